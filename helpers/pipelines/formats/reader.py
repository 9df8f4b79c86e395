"""Reads a data set, whatever its format: by place, in order, by label; and what happens where it is broken.

    reader = mapped.open_(folder, faults="skip", check_image=True)
    reader[3]                                   # Sample(key, label, data), or a Fault
    for item in reader.stream(): ...            # each place in order
    DataLoader(reader, batch_size=64, sampler=Permutation(len(reader)), num_workers=4, collate_fn=collate)

Nothing is lost silently: every place gives exactly one thing, its sample or, with faults="skip", the `Fault` that says
why there is none. `collate` leaves faults out of a batch and puts them beside it, so that they cross from a worker to
the main process; `whole` does it for a plain loop. With faults="refuse" the first fault is raised.
"""

import io
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .sample import POLICIES, Fault, FormatError, Sample, allowed


class Store(Protocol):
    """What a format does. It raises `FormatError` for what it can't read, and may go through `pickle` and `fork`."""

    kind: str
    faults: list[Fault]  # what was wrong at opening
    shards: list[range]  # runs of places that are cheap to read in order; together all places, in order

    @property
    def labels(self) -> np.ndarray: ...  # (N,) int64

    @property
    def keys(self) -> list[str]: ...

    def read(self, place: int) -> Sample: ...

    def run(self, piece: range) -> Iterator[Sample]:
        """The samples of a piece of one shard by the fastest way in order. May end early, where that way stumbles."""

    def close(self) -> None: ...


class Reader(Dataset):
    """A data set that is open. Files are opened when they are first read, in each process anew where that is needed.

    `faults` has what was wrong when it was opened: a shard without an index, whose samples are then not counted; one
    that is shorter than its index says, whose last samples will be faults of their own.
    """

    def __init__(self, store: Store, faults: str = "refuse", check_image: bool = False) -> None:
        allowed("faults", faults, POLICIES)
        if check_image and store.kind != "image":
            raise ValueError(f"check_image is {check_image!r}; the data set has {store.kind}, not images")
        self.store, self.policy, self.check_image = store, faults, check_image

    @property
    def kind(self) -> str:
        return self.store.kind

    @property
    def faults(self) -> list[Fault]:
        return self.store.faults

    @property
    def shards(self) -> list[range]:
        return self.store.shards

    @property
    def labels(self) -> np.ndarray:
        """(N,) int64. From a table that is read at opening; `tfrecord` has none and reads every record, once."""
        return self.store.labels

    @property
    def keys(self) -> list[str]:
        """Costs what `labels` costs."""
        return self.store.keys

    def find(self, label: int) -> np.ndarray:
        """The places with a label, ascending: one pass over `labels`."""
        return np.flatnonzero(self.labels == label)

    def __len__(self) -> int:
        return self.shards[-1].stop

    def __getitem__(self, place: int) -> Sample | Fault:
        if not -len(self) <= place < len(self):
            raise IndexError(f"sample {place} of a data set of {len(self)} samples")
        return self._settled(int(place) % len(self))

    def stream(self, pieces: Iterable[range] | None = None) -> Iterator[Sample | Fault]:
        """What the places of each piece hold, in order; of all shards if none are given.

        A piece that begins where a shard begins is read by the format's own library. Where that stumbles, the rest of
        the piece is read by index: one broken sample does not cost its shard.
        """
        for piece in self.shards if pieces is None else pieces:
            place = piece.start
            for sample in self.store.run(piece):
                yield self._settled(place, sample)
                place += 1
            for rest in range(place, piece.stop):
                yield self._settled(rest)

    def close(self) -> None:
        """Let go of open files; reading opens them again."""
        self.store.close()

    def _settled(self, place: int, sample: Sample | None = None) -> Sample | Fault:
        """A place's sample, read unless given, and checked as wanted; or its fault, if that is not to be raised."""
        try:
            sample = self.store.read(place) if sample is None else sample
            if self.check_image:
                try:
                    decode(sample.data)
                except ValueError as error:
                    raise FormatError(
                        Fault(self.store.file_of(place), place, f"{error} (key {sample.key!r})")
                    ) from error
            return sample
        except FormatError as error:
            if self.policy == "refuse":
                raise
            return error.fault


class Batch(NamedTuple):
    keys: list[str]
    labels: Tensor  # (B,) int64
    data: list[np.ndarray]  # B arrays (n_i,)
    faults: list[Fault]


def collate(items: Iterable[Sample | Fault]) -> Batch:
    """The samples of a batch, and the faults beside them."""
    faults: list[Fault] = []
    samples = list(whole(items, faults))
    labels = torch.tensor([sample.label for sample in samples], dtype=torch.int64)
    return Batch([sample.key for sample in samples], labels, [sample.data for sample in samples], faults)


def whole(items: Iterable[Sample | Fault], faults: list[Fault]) -> Iterator[Sample]:
    """The samples among items; faults are put on the list, in passing."""
    for item in items:
        if isinstance(item, Fault):
            faults.append(item)
        else:
            yield item


def decode(data: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8 of an image file's content. Raises ValueError whatever is wrong with it."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except Exception as error:  # a decoder that is given nonsense raises anything: struct.error, SyntaxError, …
        said = str(error) if isinstance(error, OSError) and len(data) and "BytesIO" not in str(error) else ""
        raise ValueError(f"not a readable image ({said or f'{len(data)} bytes of no known kind'})") from error
