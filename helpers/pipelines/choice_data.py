"""What the choice of data is tried on: digits that come with scikit-learn, drawn garments, or a folder of photos.

Each is pooled and split anew by every seed, so that a test set of a few hundred samples says something when seeds are
averaged. Everything lies on the device as a whole: 0.3 MB of digits, 94 MB of 8,000 garments.
"""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from helpers.lab.machine import NOT_INSTALLED, installed

DIGITS, GARMENTS = "digits", "garments"
TEST_EVERY = 3  # of each class one sample in so many is for the test
SIDE = 32  # photos are squeezed to so many pixels a side
GARMENT_COUNTS = {"samples": 8000, "validation_samples": 4000}  # pooled; so a seed trains on 8,000 and tests on 4,000


@dataclass(frozen=True)
class Split:
    """Images (N, C, H, W) fp32 of mean 0 and deviation 1 in each channel, labels (N,) int64."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int
    source: str

    def __len__(self) -> int:
        return len(self.labels)


def derived(seed: int, purpose: str) -> int:
    """A seed of its own for each purpose. With one for all, what is drawn would agree: wrong labels and what to leave
    out would be the same samples.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:6])


def chance(seed: int, purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(derived(seed, purpose))


def missing(data: str | Path) -> str | None:
    """Why this data can't be had on this machine, or None."""
    package, module = ("scikit-learn", "sklearn") if str(data) == DIGITS else ("pillow", "PIL")
    return None if installed(module) else NOT_INSTALLED + package


def split(data: str | Path, seed: int, device: torch.device) -> Split:
    """Training and test data of "digits", "garments" or a folder of photos; `seed` decides what is for the test.

    The first call for garments draws them, about 4 ms of a core each, into the cache; for photos, decodes the folder.
    """
    images, labels, source = _pool(str(data))
    shuffled = torch.randperm(len(labels), generator=chance(seed, "split"))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    for_test = torch.zeros(len(labels), dtype=torch.bool)
    for_test[by_class[::TEST_EVERY]] = True
    train, test = (images[chosen].float() for chosen in (~for_test, for_test))
    mean, deviation = (moment(train, dim=(0, 2, 3), keepdim=True) for moment in (torch.mean, torch.std))
    return Split(
        ((train - mean) / deviation).to(device),
        labels[~for_test].to(device),
        ((test - mean) / deviation).to(device),
        labels[for_test].to(device),
        int(labels.max()) + 1,
        source,
    )


@functools.lru_cache(maxsize=2)
def _pool(data: str) -> tuple[Tensor, Tensor, str]:
    """All images (N, C, H, W) uint8 and labels (N,) on the CPU, and what they are."""
    if data not in (DIGITS, GARMENTS) and not Path(data).is_dir():
        raise ValueError(f"data is {data!r}; it must be {DIGITS!r}, {GARMENTS!r} or a folder of photos")
    if reason := missing(data):
        raise ModuleNotFoundError(reason)
    if data == DIGITS:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.from_numpy(digits.images).to(torch.uint8)[:, None]
        return images, torch.from_numpy(digits.target).long(), "digits of scikit-learn, 8×8"
    return _photos(None if data == GARMENTS else data)


def _photos(folder: str | None) -> tuple[Tensor, Tensor, str]:
    from helpers.pictures import decode_photos, photo_files

    # Drawn with more pixels than are used: fine detail is lost, as on photos.
    parts = photo_files(size=(48, 48), **GARMENT_COUNTS) if folder is None else photo_files(folder)
    images, labels = [], []
    for part in parts:
        kept = decode_photos(part, SIDE)
        images.append(kept.pixels[kept.usable].permute(0, 3, 1, 2))
        labels.append(torch.from_numpy(part.labels[kept.usable]))
    return torch.cat(images), torch.cat(labels), f"{parts[0].source}, as {SIDE}×{SIDE}"
