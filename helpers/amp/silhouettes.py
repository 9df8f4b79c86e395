"""Draws a car in front of clutter, and the mask of the car. numpy only; all of a picture follows from its generator.

Lengths are shares of the picture's side, y points down. A car is a profile: for each column of pixels, where its top
and its bottom are. So the outline costs a few operations on rows and columns, and only colours cost pixels.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

Array = np.ndarray

# Outlines as (percent of the length, percent of the height), seen from the left side; the front is to the left.
SIDES = {
    "sedan": [(0, 32), (2, 50), (26, 58), (40, 97), (50, 100), (66, 97), (82, 65), (98, 60), (100, 30)],
    "hatchback": [(0, 30), (2, 48), (24, 60), (40, 97), (52, 100), (84, 95), (97, 60), (100, 30)],
    "estate": [(0, 30), (2, 48), (25, 58), (38, 96), (46, 100), (90, 98), (98, 62), (100, 30)],
    "van": [(0, 28), (2, 45), (14, 56), (27, 95), (36, 100), (97, 99), (99, 70), (100, 25)],
    "pickup": [(0, 35), (2, 52), (26, 60), (37, 96), (43, 100), (57, 98), (63, 60), (99, 58), (100, 35)],
}
FRONT = [(0, 10), (2, 50), (10, 60), (20, 93), (32, 100), (68, 100), (80, 93), (90, 60), (98, 50), (100, 10)]
PAINTS = np.array(
    [(0.9, 0.9, 0.9), (0.7, 0.71, 0.73), (0.45, 0.46, 0.48), (0.12, 0.12, 0.13), (0.55, 0.1, 0.1), (0.12, 0.2, 0.45),
     (0.45, 0.4, 0.32), (0.2, 0.32, 0.24), (0.75, 0.6, 0.3), (0.35, 0.5, 0.6)], dtype=np.float32
)  # fmt: skip


@dataclass(frozen=True)
class _Car:
    front_view: bool
    left: float
    length: float
    sill: float  # y of the underbody
    height: float  # from the sill to the roof
    wheels: tuple[float, ...]  # their centres, as shares of the length
    radius: tuple[float, float]  # of a wheel in x and in y
    u: Array  # (W,) the columns as shares of the length
    rise: Array  # (W,) the top above the sill as a share of the height
    top: Array  # (W,)
    bottom: Array  # (W,)


def draw(rng: Generator, size: int) -> tuple[Array, Array]:
    """An image (3, size, size) in float32 of 0 … 1, and its mask (size, size) of booleans."""
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size
    x, y = axis[None, :], axis[:, None]
    car = _car(rng, axis, size)
    image = _background(rng, y, car.sill, size)
    paint = _paint_colour(rng, image)
    for _ in range(rng.integers(6, 13)):
        _clutter(rng, image, axis, paint)
    _shadow(rng, image, x, y, car)
    mask = _draw_car(rng, image, axis, car, paint)
    _light(rng, image, x, y)
    return image, mask


def _car(rng: Generator, axis: Array, size: int) -> _Car:
    front_view = rng.random() < 0.25
    metre = rng.uniform(0.15, 0.215)
    tall = metre * rng.uniform(1.35, 1.8)  # Carvana's photos are squeezed in width; so are these
    clearance, wheel = rng.uniform(0.12, 0.25), rng.uniform(0.29, 0.4)
    if front_view:
        points, length, height = np.array(FRONT) / 100, 1.9 * rng.uniform(1.3, 1.7), rng.uniform(1.2, 1.55)
        wheels, radius = (0.13, 0.87), (0.13, wheel)
    else:
        name = list(SIDES)[rng.integers(len(SIDES))]
        points, length, height = np.array(SIDES[name]) / 100, rng.uniform(3.9, 5.0), rng.uniform(1.1, 1.45)
        height += 0.5 * (name == "van")
        oblique = rng.uniform(0.7, 1)
        length *= oblique
        wheels, radius = (rng.uniform(0.16, 0.21), rng.uniform(0.77, 0.83)), (wheel * oblique, wheel)
    points[1:-1] += rng.uniform(-0.025, 0.025, (len(points) - 2, 2))
    length, height = min(length * metre, 0.94), height * tall
    left = np.clip(0.5 + rng.uniform(-0.16, 0.16) - length / 2, 0.03, 0.97 - length)
    ground = rng.uniform(min(0.92, height + 0.15), 0.95)
    sill = ground - clearance * tall
    u = (axis - left) / length
    if rng.random() < 0.5:
        u = 1 - u
    width = max(3, int(0.03 * length * size) | 1)
    ragged = np.interp(u, np.linspace(0, 1, 24), rng.normal(0, 0.009, 24))
    rise = np.interp(u, points[:, 0], points[:, 1]) + ragged
    rise = np.convolve(np.pad(rise, width // 2, mode="edge"), np.full(width, 1 / width), mode="valid")
    if not front_view and rng.random() < 0.4:  # roof rack, spoiler
        start = rng.uniform(0.4, 0.8)
        rise += 0.05 * ((u > start) & (u < start + rng.uniform(0.03, 0.2)))
    inside = (u >= 0) & (u <= 1)
    under = sill + np.interp(u, np.linspace(0, 1, 12), rng.uniform(-0.01, 0.012, 12))
    radius = (radius[0] * metre, radius[1] * tall)
    for centre in wheels:
        q = np.abs(u - centre) * length / radius[0]
        reach = np.sqrt(np.clip(1 - q ** (8 if front_view else 2), 0, 1))
        under = np.where(q < 1, np.maximum(under, ground - radius[1] + radius[1] * reach), under)
    top = np.where(inside, sill - height * rise, 2.0)
    bottom = np.where(inside, under, -2.0)
    parts = (array.astype(np.float32) for array in (u, rise, top, bottom))
    return _Car(front_view, float(left), length, sill, height, wheels, radius, *parts)


def _background(rng: Generator, y: Array, sill: float, size: int) -> Array:
    """Wall and floor with two textures in random colours, whose contrast is that of cars."""
    wall, floor = (PAINTS[rng.integers(len(PAINTS))] * 0.5 + rng.uniform(0.1, 0.5) for _ in range(2))
    horizon, soft = sill - rng.uniform(0.02, 0.3), rng.uniform(0.01, 0.15)
    share = np.clip((y[None] - horizon) / soft + 0.5, 0, 1)  # (1, H, 1)
    image = np.broadcast_to(wall[:, None, None] + (floor - wall)[:, None, None] * share, (3, size, size))
    for _ in range(2):
        colour = rng.uniform(0.01, 0.08) * (rng.normal(0, 0.35, 3) + 1)
        image = image + colour[:, None, None].astype(np.float32) * _window(rng, _texture(size), size)
    return image.astype(np.float32)


def _paint_colour(rng: Generator, image: Array) -> Array:
    """A paint, often mixed with the colour that is seen somewhere behind the car."""
    size = image.shape[1]
    row, column = rng.integers(size // 4, 3 * size // 4, 2)
    behind = image[:, row, column] * rng.uniform(0.8, 1.1)
    share = rng.uniform(0, 0.75) if rng.random() < 0.6 else 0.0
    return ((1 - share) * PAINTS[rng.integers(len(PAINTS))] + share * behind).astype(np.float32)


def _clutter(rng: Generator, image: Array, axis: Array, paint: Array) -> None:
    """One thing that is no car: a box, a post, a round thing, a wheel; a third of them in the car's own colour."""
    size = len(axis)
    kind = rng.integers(4)
    cx, cy = rng.uniform(0, 1, 2)
    rx, ry = rng.uniform(0.02, 0.14, 2)
    if kind == 1:
        rx, ry = rx / 4, ry * 3
    if kind == 3:
        ry = rx = rx / 2 + 0.015
    columns = slice(max(0, int((cx - rx) * size)), min(size, int((cx + rx) * size) + 2))
    rows = slice(max(0, int((cy - ry) * size)), min(size, int((cy + ry) * size) + 2))
    x, y, part = axis[None, columns], axis[rows, None], image[:, rows, columns]
    colour = paint if rng.random() < 0.35 else PAINTS[rng.integers(len(PAINTS))]
    colour = colour * rng.uniform(0.6, 1.2)
    alpha = _round(x, y, cx, cy, rx, ry, size) if kind >= 2 else _box(x, y, cx, cy, rx, ry, size)
    _blend(part, alpha * rng.uniform(0.5, 1), colour * 0.2 if kind == 3 else colour)
    if kind == 3:
        _blend(part, _round(x, y, cx, cy, rx * 0.6, ry * 0.6, size), colour)


def _shadow(rng: Generator, image: Array, x: Array, y: Array, car: _Car) -> None:
    ground = float(car.bottom.max())
    across = np.exp(-(((x - car.left - car.length / 2 - rng.uniform(-0.05, 0.05)) / (0.55 * car.length)) ** 4))
    along = np.exp(-(((y - ground) / rng.uniform(0.015, 0.06)) ** 2))
    image *= 1 - np.float32(rng.uniform(0.2, 0.75)) * (along * across)


def _draw_car(rng: Generator, image: Array, axis: Array, car: _Car, paint: Array) -> Array:
    """Paints the car over the image and returns its mask (H, W)."""
    size = len(axis)
    inside = np.flatnonzero(car.bottom > -1)
    columns = slice(inside[0], inside[-1] + 1)
    rows = slice(max(0, int(car.top.min() * size) - 1), min(size, int(car.bottom.max() * size) + 2))
    x, y, part = axis[None, columns], axis[rows, None], image[:, rows, columns]
    u, rise, top, bottom = (array[None, columns] for array in (car.u, car.rise, car.top, car.bottom))
    alpha = _edge(y - top, size) * _edge(bottom - y, size)  # (h, w)
    v = (car.sill - y) / car.height  # (h, 1) height as a share of the car's
    gloss = rng.uniform(0.05, 0.25) * np.exp(-(((v - rng.uniform(0.4, 0.55)) / 0.06) ** 2))
    shade = rng.uniform(0.55, 0.85) + rng.uniform(0.1, 0.5) * v + gloss - 0.35 * (v < 0.08)
    shade = shade + rng.uniform(0, 0.06) * _window(rng, _texture(size), size)[rows, columns]
    doors = (np.abs(u - 0.42) < 0.004) | (np.abs(u - 0.63) < 0.004)
    shade *= 1 - 0.35 * (doors & (v > 0.12) & (not car.front_view))
    body = paint[:, None, None] * shade
    _blend(body, _glass(rng, car, u, v, rise, size), 0.12 + rng.uniform(0, 0.6) * part.mean(axis=(1, 2)))
    tyre, hub = rng.uniform(0.04, 0.16), rng.uniform(0.3, 0.8)
    for centre in car.wheels:
        cx = x[0, np.abs(u[0] - centre).argmin()]
        cy = float(car.bottom.max()) - car.radius[1]
        rx, ry = car.radius
        if car.front_view:
            _blend(body, _box(x, y, cx, cy + ry, 1.1 * rx, 1.3 * ry, size), np.full(3, tyre))
        else:
            _blend(body, _round(x, y, cx, cy, 1.12 * rx, 1.12 * ry, size), np.full(3, tyre))
            _blend(body, _round(x, y, cx, cy, 0.62 * rx, 0.62 * ry, size), np.full(3, hub))
    white, red = (0.95, 0.93, 0.8), (0.6, 0.05, 0.05)
    for at, colour in ((0.14, white), (0.86, white)) if car.front_view else ((0.03, white), (0.97, red)):
        _blend(body, np.clip(1.5 - ((u - at) / 0.035) ** 2 - ((v - 0.42) / 0.06) ** 2, 0, 1), np.array(colour))
    part += alpha * (body - part)
    mask = np.zeros((size, size), dtype=bool)
    mask[rows, columns] = alpha > 0.5
    return mask


def _glass(rng: Generator, car: _Car, u: Array, v: Array, rise: Array, size: int) -> Array:
    """Windows under the roof and above the belt, with pillars between."""
    scale = size * car.height
    belt = rng.uniform(0.6, 0.66)
    window = _edge(v - belt, scale) * _edge(rise - 0.08 - v, scale)
    pillars = () if car.front_view else (0.42, rng.uniform(0.6, 0.68))
    for pillar in pillars:
        window = window * (np.abs(u - pillar) > 0.012)
    return window * rng.uniform(0.75, 1)


def _light(rng: Generator, image: Array, x: Array, y: Array) -> None:
    """Light that falls off to one side, contrast, and grain."""
    size = image.shape[1]
    image *= (
        (1 + rng.uniform(-0.25, 0.25) * (x - 0.5)) * (1 + rng.uniform(-0.25, 0.25) * (y - 0.5)) * rng.uniform(0.8, 1.15)
    )
    image += np.float32(rng.uniform(0.01, 0.05)) * _window(rng, _grain(size), size)
    np.clip(image, 0, 1, out=image)


def _edge(distance: Array, size: float) -> Array:
    """Coverage of a pixel whose centre lies so far inside an edge: half on the edge itself."""
    return np.clip(distance * np.float32(size) + np.float32(0.5), 0, 1)


def _round(x: Array, y: Array, cx: float, cy: float, rx: float, ry: float, size: int) -> Array:
    return _edge((1 - ((x - cx) / rx) ** 2 - ((y - cy) / ry) ** 2) * (min(rx, ry) / 2), size)


def _box(x: Array, y: Array, cx: float, cy: float, rx: float, ry: float, size: int) -> Array:
    return _edge(rx - np.abs(x - cx), size) * _edge(ry - np.abs(y - cy), size)


def _blend(image: Array, alpha: Array, colour: Array) -> None:
    image += alpha.astype(np.float32) * (colour.astype(np.float32)[:, None, None] - image)


def _window(rng: Generator, tile: Array, size: int) -> Array:
    """A random part of a tile that is twice as large: noise for the price of a slice."""
    row, column = rng.integers(0, size + 1, 2)
    return tile[..., row : row + size, column : column + size]


@functools.lru_cache(maxsize=4)
def _grain(size: int) -> Array:
    """White noise (3, 2·size, 2·size)."""
    return np.random.default_rng(1).standard_normal((3, 2 * size, 2 * size), dtype=np.float32)


@functools.lru_cache(maxsize=4)
def _texture(size: int) -> Array:
    """Noise (2·size, 2·size) with more weight on coarse scales, of deviation 1."""
    rng, side = np.random.default_rng(2), 2 * size
    total = np.zeros((side, side), dtype=np.float32)
    cells = 6
    while cells < side:
        at = np.linspace(0, cells - 1, side)
        spread = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(cells)))  # (2·size, cells) linear interpolation
        total += (spread @ rng.standard_normal((cells, cells)) @ spread.T / cells**0.6).astype(np.float32)
        cells *= 2
    return total / total.std()
