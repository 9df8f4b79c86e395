"""Draws a picture of one thing, with its mask: a shape in a pose, fabric or paint, clutter behind, light and grain.

    image = draw_garment(np.random.default_rng(0), "t-shirt")     # PIL's, 400×533 pixels
    image, mask = draw_car(np.random.default_rng(0), 256)         # (256, 256, 3) uint8 and (256, 256) bool

All of a picture follows from its generator. 400×533 pixels cost about 40 ms of one core, 256×256 about 10.
"""

import functools
import math

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw, ImageFilter

from .shapes import GARMENTS, Points, Shape, car

Array = np.ndarray

PATTERNS = ("plain", "stripes", "bands", "checks", "dots")


def draw_garment(rng: Generator, kind: str, size: tuple[int, int] = (400, 533)) -> Image.Image:
    """A photo of width × height pixels with one garment of a kind in it, plain or patterned by chance.

    Cloth is mostly darker than what it lies on, as on photos that are meant to show it.
    """
    garment = GARMENTS[kind](rng)
    pose = _pose(rng, garment, size)
    image = _background(rng, size)
    cover = _cover(garment, pose, size)
    _cast_shadow(rng, image, cover)
    pattern = PATTERNS[rng.integers(1, len(PATTERNS)) if rng.random() < 0.5 else 0]
    fabric = _fabric(rng, pose, size, pattern)
    fabric *= 1 - rng.uniform(0.35, 0.7) * _details(garment, pose, size)[..., None]
    image += cover[..., None] * (fabric - image)
    return Image.fromarray(_photographed(rng, image))


def draw_car(rng: Generator, side: int) -> tuple[Array, Array]:
    """A car, (side, side, 3) uint8, and where it is, (side, side) bool: about a fifth of the pixels.

    Paint, background and clutter have colours of the same distribution, and often nearly the same colour, so that
    neither place nor colour alone tells the car.
    """
    shape, size = car(rng), (side, side)
    pose = _pose(rng, shape, size, turn=3, centre=(0.38, 0.62))
    paint = _colour(rng, 0.05, 0.95)
    image = _background(rng, size, paint)
    cover = _cover(shape, pose, size)
    _cast_shadow(rng, image, cover)
    body = paint * (1 + rng.uniform(0.05, 0.2) * _noise(rng, size, coarse=True))[..., None]
    body *= 1 - 0.35 * _details(shape, pose, size)[..., None]
    greys, panels = Image.new("L", size), Image.new("L", size)
    for points, grey in shape.panels:
        ImageDraw.Draw(greys).polygon(_to_pixels(pose, points), fill=int(255 * grey))
        ImageDraw.Draw(panels).polygon(_to_pixels(pose, points), fill=255)
    body = np.where(np.asarray(panels)[..., None] > 0, np.asarray(greys, dtype=np.float32)[..., None] / 255, body)
    image += cover[..., None] * (body - image)
    return _photographed(rng, image), cover > 0.5


def _pose(
    rng: Generator, shape: Shape, size: tuple[int, int], turn: float = 15, centre: tuple[float, float] = (0.44, 0.56)
) -> Array:
    """(2, 3): the shape's plane to pixels. Turned by up to so many degrees, sheared, most of it in the picture.

    `centre` is where its middle may lie, in shares of the picture's sides.
    """
    points = np.array([point for outline in shape.outlines for point in outline])
    low, high = points.min(axis=0), points.max(axis=0)
    angle = rng.uniform(-turn, turn) * math.pi / 180
    rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    shear = turn / 100
    linear = rotation @ np.array([[1.0, rng.uniform(-shear, shear)], [0.0, rng.uniform(0.85, 1.15)]])
    turned = (points - (low + high) / 2) @ linear.T
    linear *= rng.uniform(*shape.fills) * (np.array(size) / np.ptp(turned, axis=0)).min()
    middle = np.array(size) * rng.uniform(*centre, 2)
    return np.concatenate([linear, (middle - linear @ (low + high) / 2)[:, None]], axis=1)


def _to_pixels(pose: Array, points: Points) -> list[tuple[float, float]]:
    return [tuple(map(float, pose[:, :2] @ point + pose[:, 2])) for point in points]


def _cover(shape: Shape, pose: Array, size: tuple[int, int]) -> Array:
    """How much of a pixel is covered, (H, W), 0 to 1; corners are a little round."""
    mask = Image.new("L", size)
    for outline in shape.outlines:
        ImageDraw.Draw(mask).polygon(_to_pixels(pose, outline), fill=255)
    return _blurred(np.asarray(mask, dtype=np.float32) / 255, size[0] / 250)


def _cast_shadow(rng: Generator, image: Array, cover: Array) -> None:
    """Darkens the image (H, W, 3) beside what lies on it."""
    width = image.shape[1]
    shadow = np.roll(_blurred(cover, width / 40), rng.integers(1, 1 + max(width // 40, 1), 2), axis=(0, 1))
    image *= 1 - rng.uniform(0.1, 0.5) * shadow[..., None]


def _details(shape: Shape, pose: Array, size: tuple[int, int]) -> Array:
    """Lines and dots, (H, W), 0 or 1."""
    mask = Image.new("L", size)
    pen, width = ImageDraw.Draw(mask), max(1, size[0] // 130)
    for line in shape.lines:
        pen.line(_to_pixels(pose, line), fill=255, width=width)
    for x, y in _to_pixels(pose, shape.dots):
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


def _background(rng: Generator, size: tuple[int, int], paint: Array | None = None) -> Array:
    """Floor or wall (H, W, 3) in two shades, with texture and a few things that lie about.

    Behind cloth it is mostly light. Given a car's paint, it has any shade, there are more things, and all of it may
    have that colour.
    """
    width, height = size
    ramp = np.linspace(0, 1, height, dtype=np.float32)[:, None, None]
    light = paint is None and rng.random() < 0.85
    base = _colour(rng, 0.55, 0.95) if light else _colour(rng, 0.05, 0.95)
    if paint is not None and rng.random() < 0.6:
        base += rng.uniform(0, 0.75) * (paint - base)
    image = np.broadcast_to(base * (1 + rng.uniform(-0.3, 0.3) * ramp), (height, width, 3)).astype(np.float32)
    image *= 1 + rng.uniform(0.01, 0.05) * _noise(rng, size, coarse=bool(rng.random() < 0.5))[..., None]
    pixels = Image.fromarray(_to_bytes(image))
    pen = ImageDraw.Draw(pixels)
    for _ in range(rng.integers(0, 6) if paint is None else rng.integers(6, 13)):
        cx, cy = rng.uniform(0, 1, 2) * size
        rx, ry = rng.uniform(0.03, 0.2, 2) * width
        shape = pen.rectangle if rng.random() < 0.5 else pen.ellipse
        as_painted = paint is not None and rng.random() < 0.35
        colour = paint * rng.uniform(0.6, 1.0) if as_painted else _colour(rng, 0.05, 0.95)
        shape([cx - rx, cy - ry, cx + rx, cy + ry], fill=tuple(int(255 * c) for c in colour))
    return np.asarray(pixels, dtype=np.float32) / 255


def _photographed(rng: Generator, image: Array) -> Array:
    """The image as bytes, with light, contrast and grain."""
    height, width = image.shape[:2]
    light = 1 + rng.uniform(-0.25, 0.25) * np.linspace(-1, 1, width, dtype=np.float32)
    image = image * (light * rng.uniform(0.75, 1.2))[None, :, None]
    image += rng.uniform(0.003, 0.015) * _noise(rng, (width, height), coarse=False)[..., None]
    return _to_bytes(image)


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
