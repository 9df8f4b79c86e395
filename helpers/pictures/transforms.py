"""What happens to a photo before a model sees it: a part of it is cut out, made square, perhaps mirrored, normalised.

Chance is apart from pixels. `draw_cuts` draws the numbers of a whole epoch at once, in the main process, from the seed
and the epoch; whatever cuts the pixels (this process, a worker, the GPU) only follows them. So the pictures of an epoch
don't depend on how many workers there are, and no two workers or epochs repeat each other's.

A box is (left, top, right, bottom) in shares of the photo's sides, so that it holds for the photo at any size.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

Array = np.ndarray

AREA = (0.25, 1.0)  # share of the photo that a random part covers; less often shows nothing but cloth
RATIO = (3 / 4, 4 / 3)  # its width to its height, in pixels
MIDDLE = 7 / 8  # of the shorter side, where the middle is cut out: 224 of 256 pixels

MEAN = (0.485, 0.456, 0.406)  # of 0 … 1, by channel
STD = (0.229, 0.224, 0.225)


def draw_cuts(count: int, seed: int, epoch: int) -> Array:
    """Chance for `count` photos, (count, 5): area, log of the ratio, where in x, where in y, mirrored or not."""
    rng = np.random.default_rng([seed, epoch])
    low = [AREA[0], math.log(RATIO[0]), 0.0, 0.0, 0.0]
    high = [AREA[1], math.log(RATIO[1]), 1.0, 1.0, 1.0]
    cuts = rng.uniform(low, high, (count, 5))
    cuts[:, 4] = cuts[:, 4] < 0.5
    return cuts


def random_boxes(cuts: Array, sizes: Array) -> Array:
    """The boxes (…, 4) of cuts (…, 5) in photos of `sizes` (…, 2), width and height.

    Where a part would stick out of the photo it is made as long as the side: never a second draw.
    """
    width, height = sizes[..., 0], sizes[..., 1]
    area, ratio = cuts[..., 0], np.exp(cuts[..., 1])
    across = np.minimum(np.sqrt(area * ratio * height / width), 1.0)
    down = np.minimum(np.sqrt(area / ratio * width / height), 1.0)
    left, top = cuts[..., 2] * (1 - across), cuts[..., 3] * (1 - down)
    return np.stack([left, top, left + across, top + down], axis=-1)


def middle_boxes(sizes: Array) -> Array:
    """The boxes (…, 4) of the square in the middle whose side is 7/8 of the shorter one."""
    sizes = np.asarray(sizes, dtype=np.float64)
    half = MIDDLE * sizes.min(axis=-1, keepdims=True) / sizes / 2
    return np.concatenate([0.5 - half, 0.5 + half], axis=-1)


def boxes_within(inner: Array, outer: Array) -> Array:
    """`inner`, given in shares of `outer`, in shares of the photo."""
    start, extent = outer[..., :2], outer[..., 2:] - outer[..., :2]
    return np.concatenate([start + inner[..., :2] * extent, start + inner[..., 2:] * extent], axis=-1)


def cut_image(image: Image.Image, box: Array, side: int) -> Image.Image:
    """The box of a PIL image at side×side: cut and resized in one pass, with every source pixel weighted in."""
    width, height = image.size
    pixels = tuple(float(share) * length for share, length in zip(box, (width, height) * 2, strict=True))
    return image.resize((side, side), Image.Resampling.BILINEAR, box=pixels)


def cut_on_device(images: Tensor, boxes: Tensor, mirrored: Tensor, side: int) -> Tensor:
    """The boxes of images (B, 3, h, w) at side×side, as floating point in the images' range, all in one kernel.

    Interpolates between the four nearest pixels, which is right down to half the size, and loses detail below.
    """
    extent = boxes[:, 2:] - boxes[:, :2]  # (B, 2)
    centre = boxes[:, 2:] + boxes[:, :2] - 1  # the range is -1 … 1
    across = torch.where(mirrored, -extent[:, 0], extent[:, 0])
    zero = torch.zeros_like(across)
    rows = torch.stack([across, zero, centre[:, 0], zero, extent[:, 1], centre[:, 1]], dim=1)
    grid = F.affine_grid(rows.view(-1, 2, 3), [len(images), 3, side, side], align_corners=False)
    return F.grid_sample(images.to(grid.dtype), grid, padding_mode="border", align_corners=False)


def to_tensor(image: Image.Image) -> Tensor:
    """An RGB image of PIL as uint8 (3, H, W)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def channel_constants(device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Mean and deviation by channel, (3, 1, 1), of pixels 0 … 255. On a GPU the host waits for the copy."""
    return tuple(255 * torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Pixels 0 … 255, (…, 3, H, W), as fp32 of mean 0 and deviation 1. From uint8, fp32 takes four times the bytes."""
    return (images.float() - mean) / std
