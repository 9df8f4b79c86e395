"""Draws a photo of a garment: an outline by kind, a pose, fabric with folds and a pattern, clutter behind.

Outlines live in the garment's own plane: x from -1 to 1, y from 0 at the top to 1 or so, down. A pose maps that plane
to pixels. The kind follows from outline and details alone: colours, patterns, places and backgrounds are those of any.
Cloth is mostly darker than what it lies on, as on photos that are meant to show it.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw, ImageFilter

Array = np.ndarray
Points = list[tuple[float, float]]

PATTERNS = ("plain", "stripes", "bands", "checks", "dots")


@dataclass
class Garment:
    """Outlines that are filled with fabric, and lines and dots that are drawn on it in a darker or lighter tone."""

    outlines: list[Points]
    lines: list[Points] = field(default_factory=list)
    dots: Points = field(default_factory=list)


def draw(rng: Generator, kind: str, size: tuple[int, int] = (400, 533), patterned: bool | None = None) -> Image.Image:
    """A photo of width × height pixels with one garment of a kind in it; plain or patterned by chance unless given.

    Costs about 40 ms of one core at 400×533.
    """
    garment = KINDS[kind](rng)
    pose = _pose(rng, garment, size)
    image = _background(rng, size)
    cover = _cover(garment, pose, size)
    shadow = np.roll(_blurred(cover, size[0] / 40), rng.integers(1, 1 + max(size[0] // 40, 1), 2), axis=(0, 1))
    image *= 1 - rng.uniform(0.1, 0.5) * shadow[..., None]
    patterned = rng.random() < 0.5 if patterned is None else patterned
    fabric = _fabric(rng, pose, size, PATTERNS[rng.integers(1, len(PATTERNS)) if patterned else 0])
    fabric *= 1 - rng.uniform(0.35, 0.7) * _details(garment, pose, size)[..., None]
    image += cover[..., None] * (fabric - image)
    return _photographed(rng, image)


# Kinds. What makes one is fixed; lengths and widths are chance.


def _tshirt(rng: Generator) -> Garment:
    return _top(rng, sleeve=rng.uniform(0.22, 0.36), length=rng.uniform(0.95, 1.15))


def _longsleeve(rng: Generator) -> Garment:
    return _top(rng, sleeve=rng.uniform(0.8, 1.0), length=rng.uniform(0.95, 1.15))


def _shirt(rng: Generator) -> Garment:
    """Buttons down the middle and a collar; sleeves of any length."""
    garment = _top(rng, sleeve=rng.choice([rng.uniform(0.25, 0.4), rng.uniform(0.8, 1.0)]), length=rng.uniform(1, 1.2))
    garment.lines += [[(0.03, 0.1), (0.03, 1.0)], [(-0.22, -0.02), (-0.1, 0.14), (0, 0.04)]]
    garment.lines.append([(-x, y) for x, y in garment.lines[-1]])
    garment.dots += [(0.0, float(y)) for y in np.linspace(0.18, 0.95, rng.integers(5, 8))]
    return garment


def _outwear(rng: Generator) -> Garment:
    """Open in front: two halves with a gap between, wide sleeves, pockets."""
    garment = _top(rng, sleeve=rng.uniform(0.85, 1.0), length=rng.uniform(1.15, 1.5), wide=1.3)
    gap = rng.uniform(0.02, 0.06)
    hem = max(y for _, y in garment.outlines[0])
    right = [(max(x, gap), y) for x, y in garment.outlines[0] if x > 0]
    right = [(gap, 0.1), *right, (gap * 1.5, hem)]
    garment.outlines = [right, [(-x, y) for x, y in right]]
    lapel, pocket = [(gap, 0.55), (0.32, 0.2), (0.2, -0.02)], [(0.2, 0.8), (0.42, 0.74)]
    garment.lines = [lapel, pocket, [(-x, y) for x, y in lapel], [(-x, y) for x, y in pocket]]
    return garment


def _dress(rng: Generator) -> Garment:
    """A narrow waist and a skirt that is wider than the shoulders; short sleeves or none."""
    waist, hem, length = rng.uniform(0.24, 0.32), rng.uniform(0.55, 0.85), rng.uniform(1.5, 1.9)
    half = [(0.16, 0.0), (0.3, -0.03), (0.38, 0.25), (waist, 0.6), (hem, length)]
    if rng.random() < 0.5:
        half[2:2] = [(0.52, 0.16), (0.44, 0.27)]
    return Garment([_mirrored(half)], [[(-waist, 0.6), (waist, 0.6)]])


def _skirt(rng: Generator) -> Garment:
    waist, hem, length = rng.uniform(0.28, 0.36), rng.uniform(0.5, 0.85), rng.uniform(0.65, 1.1)
    folds = [[(waist * at, 0.1), (hem * at, length)] for at in np.linspace(-0.7, 0.7, rng.integers(2, 7))]
    return Garment([_mirrored([(waist, 0.0), (waist, 0.08), (hem, length)])], [[(-waist, 0.08), (waist, 0.08)], *folds])


def _pants(rng: Generator) -> Garment:
    return _trousers(rng, length=rng.uniform(1.55, 1.9), cuff=rng.uniform(0.13, 0.22))


def _shorts(rng: Generator) -> Garment:
    return _trousers(rng, length=rng.uniform(0.65, 0.9), cuff=rng.uniform(0.3, 0.36))


def _hat(rng: Generator) -> Garment:
    """A dome, with a brim to both sides or a peak to one."""
    dome = [(0.5 * math.cos(a), 0.5 - 0.45 * math.sin(a)) for a in np.linspace(0, math.pi, 16)]
    reach = rng.uniform(0.75, 1.0)
    both = [(reach, 0.55), (0.6, 0.66), (-0.6, 0.66), (-reach, 0.55), (-0.5, 0.46), (0.5, 0.46)]
    peak = [(0.5, 0.46), (reach, 0.56), (reach, 0.62), (-0.5, 0.56), (-0.5, 0.46)]
    band = [(-0.5, 0.45), (0.5, 0.45)]
    return Garment([dome, both if rng.random() < 0.5 else peak], [band, [(0.0, 0.05), (0.0, 0.45)]])


def _shoes(rng: Generator) -> Garment:
    """A pair from the side, one behind the other, low or up to the ankle; sole and laces."""
    ankle, toe = rng.uniform(0.0, 0.35), rng.uniform(0.85, 1.0)
    shoe = [(-0.6, ankle), (-0.25, ankle - 0.03), (-0.1, 0.42), (0.35, 0.5), (toe, 0.66), (toe, 0.8), (-0.65, 0.8)]
    sole, laces = [(-0.65, 0.72), (toe, 0.72)], [[(x, 0.36 + x / 4), (x + 0.1, 0.52)] for x in (-0.05, 0.07, 0.19)]
    dx, dy = rng.uniform(-0.25, 0.25), rng.uniform(0.5, 0.7)
    other = [[(x + dx, y + dy) for x, y in line] for line in (shoe, sole, *laces)]
    return Garment([shoe, other[0]], [sole, *laces, *other[1:]])


KINDS: dict[str, Callable[[Generator], Garment]] = {
    "t-shirt": _tshirt,
    "pants": _pants,
    "shoes": _shoes,
    "dress": _dress,
    "hat": _hat,
    "longsleeve": _longsleeve,
    "shorts": _shorts,
    "outwear": _outwear,
    "skirt": _skirt,
    "shirt": _shirt,
}


def _top(rng: Generator, sleeve: float, length: float, wide: float = 1.0) -> Garment:
    """Shoulders, two sleeves that hang at angles of their own, a straight body."""
    shoulder, body = rng.uniform(0.4, 0.46) * wide, rng.uniform(0.36, 0.44) * wide
    neck, cuff = rng.uniform(0.13, 0.2), rng.uniform(0.16, 0.22) * wide

    def half() -> Points:
        angle = rng.uniform(0.35, 1.25)  # from the horizontal
        out, across = np.array([math.cos(angle), math.sin(angle)]), np.array([-math.sin(angle), math.cos(angle)])
        outer = np.array([shoulder, 0.06]) + sleeve * out
        inner = outer + cuff * across
        return [(neck, 0.0), (shoulder, 0.06), tuple(outer), tuple(inner), (body, 0.4), (body, length)]

    right, left = half(), [(-x, y) for x, y in half()]
    seams = [[(shoulder, 0.06), (body, 0.4)], [(-shoulder, 0.06), (-body, 0.4)]]
    return Garment([[*right, *reversed(left)]], [[(-neck, 0.0), (0.0, rng.uniform(0.06, 0.2)), (neck, 0.0)], *seams])


def _trousers(rng: Generator, length: float, cuff: float) -> Garment:
    """A waistband, and two legs that part below it."""
    waist, hip, stand = rng.uniform(0.3, 0.36), rng.uniform(0.38, 0.46), rng.uniform(0.0, 0.15)
    crotch = rng.uniform(0.45, 0.55)
    half = [(waist, 0.0), (hip, 0.35), (0.06 + cuff + stand, length), (0.06 + stand, length), (0.0, crotch)]
    details = [[(-waist, 0.08), (waist, 0.08)], [(0.0, 0.08), (0.0, crotch)]]
    details += [[(0.12 * side, 0.08), (0.36 * side, 0.24)] for side in (-1, 1)]
    return Garment([_mirrored(half)], details)


def _mirrored(half: Points) -> Points:
    return [*half, *((-x, y) for x, y in reversed(half))]


# Pixels.


def _pose(rng: Generator, garment: Garment, size: tuple[int, int]) -> Array:
    """(2, 3): the garment's plane to pixels. Turned by up to 15°, sheared, most of it in the picture."""
    points = np.array([point for outline in garment.outlines for point in outline])
    low, high = points.min(axis=0), points.max(axis=0)
    angle = rng.uniform(-15, 15) * math.pi / 180
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    linear = turn @ np.array([[1.0, rng.uniform(-0.15, 0.15)], [0.0, rng.uniform(0.85, 1.15)]])
    turned = (points - (low + high) / 2) @ linear.T
    scale = rng.uniform(0.7, 1.0) * (np.array(size) / np.ptp(turned, axis=0)).min()
    centre = np.array(size) * rng.uniform(0.44, 0.56, 2)
    linear *= scale
    return np.concatenate([linear, (centre - linear @ (low + high) / 2)[:, None]], axis=1)


def _to_pixels(pose: Array, points: Points) -> list[tuple[float, float]]:
    return [tuple(map(float, pose[:, :2] @ point + pose[:, 2])) for point in points]


def _cover(garment: Garment, pose: Array, size: tuple[int, int]) -> Array:
    """How much of a pixel is garment, (H, W), 0 to 1; corners are a little round."""
    mask = Image.new("L", size)
    for outline in garment.outlines:
        ImageDraw.Draw(mask).polygon(_to_pixels(pose, outline), fill=255)
    return _blurred(np.asarray(mask, dtype=np.float32) / 255, size[0] / 250)


def _details(garment: Garment, pose: Array, size: tuple[int, int]) -> Array:
    mask = Image.new("L", size)
    pen, width = ImageDraw.Draw(mask), max(1, size[0] // 130)
    for line in garment.lines:
        pen.line(_to_pixels(pose, line), fill=255, width=width)
    for x, y in _to_pixels(pose, garment.dots):
        pen.ellipse([x - width, y - width, x + width, y + width], fill=255)
    return np.asarray(mask, dtype=np.float32) / 255


def _blurred(plane: Array, radius: float) -> Array:
    image = Image.fromarray((plane * 255).astype(np.uint8))
    return np.asarray(image.filter(ImageFilter.GaussianBlur(radius)), dtype=np.float32) / 255


def _fabric(rng: Generator, pose: Array, size: tuple[int, int], pattern: str) -> Array:
    """Colour (H, W, 3): two tones in a pattern that follows the garment, with folds."""
    inverse = np.linalg.inv(pose[:, :2])
    x, y = (np.arange(length, dtype=np.float32) - pose[axis, 2] for axis, length in enumerate(size))
    u, v = (inverse[i, 0] * x[None] + inverse[i, 1] * y[:, None] for i in (0, 1))  # (H, W) each
    step = rng.uniform(0.08, 0.2)
    tone = {
        "plain": lambda: np.zeros_like(u),
        "stripes": lambda: (u / step % 1 < 0.5) * 1.0,
        "bands": lambda: (v / step % 1 < 0.5) * 1.0,
        "checks": lambda: ((u / step % 1 < 0.5) * 1.0 + (v / step % 1 < 0.5)) / 2,
        "dots": lambda: ((u / step % 1 - 0.5) ** 2 + (v / step % 1 - 0.5) ** 2 < 0.08) * 1.0,
    }[pattern]()
    first, second = _colour(rng, 0.05, 0.65), _colour(rng, 0.05, 0.65)
    folds = 1 + rng.uniform(0.05, 0.15) * _noise(rng, size, coarse=True)
    return ((first + (second - first) * tone[..., None]) * folds[..., None]).astype(np.float32)


def _background(rng: Generator, size: tuple[int, int]) -> Array:
    """Floor or wall (H, W, 3) in two shades, with texture and a few things that lie about."""
    width, height = size
    ramp = np.linspace(0, 1, height, dtype=np.float32)[:, None, None]
    base = _colour(rng, 0.55, 0.95) if rng.random() < 0.85 else _colour(rng, 0.05, 0.95)
    image = np.broadcast_to(base * (1 + rng.uniform(-0.3, 0.3) * ramp), (height, width, 3)).astype(np.float32)
    image *= 1 + rng.uniform(0.01, 0.05) * _noise(rng, size, coarse=bool(rng.random() < 0.5))[..., None]
    pixels = Image.fromarray(_to_bytes(image))
    pen = ImageDraw.Draw(pixels)
    for _ in range(rng.integers(0, 6)):
        cx, cy = rng.uniform(0, 1, 2) * size
        rx, ry = rng.uniform(0.03, 0.2, 2) * width
        shape = pen.rectangle if rng.random() < 0.5 else pen.ellipse
        shape([cx - rx, cy - ry, cx + rx, cy + ry], fill=tuple(int(255 * c) for c in _colour(rng, 0.05, 0.95)))
    return np.asarray(pixels, dtype=np.float32) / 255


def _photographed(rng: Generator, image: Array) -> Image.Image:
    """Light, contrast and grain."""
    height, width = image.shape[:2]
    light = 1 + rng.uniform(-0.25, 0.25) * np.linspace(-1, 1, width, dtype=np.float32)
    image = image * (light * rng.uniform(0.75, 1.2))[None, :, None]
    image += rng.uniform(0.003, 0.015) * _noise(rng, (width, height), coarse=False)[..., None]
    return Image.fromarray(_to_bytes(image))


def _colour(rng: Generator, darkest: float, lightest: float) -> Array:
    """A grey between two, with more or less colour in it."""
    colour = rng.uniform(darkest, lightest) + rng.uniform(0, 0.25) * rng.standard_normal(3)
    return np.clip(colour, 0.03, 0.97).astype(np.float32)


def _to_bytes(image: Array) -> Array:
    return (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)


def _noise(rng: Generator, size: tuple[int, int], coarse: bool) -> Array:
    """Noise (H, W) of deviation 1: a random part of a tile, for the price of a slice."""
    width, height = size
    tile = _tile(max(size), coarse)
    row, column = rng.integers(0, len(tile) - max(size) + 1, 2)
    return tile[row : row + height, column : column + width]


@functools.lru_cache(maxsize=8)
def _tile(side: int, coarse: bool) -> Array:
    """(2·side, 2·side): white noise, or waves of about an eighth of the side."""
    rng = np.random.default_rng(1)
    if not coarse:
        return rng.standard_normal((2 * side, 2 * side), dtype=np.float32)
    waves = Image.fromarray(rng.standard_normal((17, 17)).astype(np.float32))
    tile = np.asarray(waves.resize((2 * side, 2 * side), Image.Resampling.BICUBIC))
    return tile / tile.std()
