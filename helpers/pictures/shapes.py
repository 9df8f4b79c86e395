"""Outlines of what is drawn: ten kinds of clothes, and cars.

A shape lies in a plane of its own: x to the right, y down, in any unit; a drawing maps that plane to pixels. What makes
a kind is fixed; lengths and widths are chance. The class of a picture follows from outline and details alone: colours,
patterns, places and backgrounds are those of any kind.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

Points = list[tuple[float, float]]


@dataclass
class Shape:
    """Outlines, filled with fabric or paint; lines and dots in a darker tone; panels, each in a grey of its own."""

    outlines: list[Points]
    lines: list[Points] = field(default_factory=list)
    dots: Points = field(default_factory=list)
    panels: list[tuple[Points, float]] = field(default_factory=list)  # grey of 0 … 1; later ones cover earlier ones
    fills: tuple[float, float] = (0.7, 1.0)  # the least and the most of a picture's side that it takes


def _shirt(rng: Generator) -> Shape:
    """Buttons down the middle and a collar; sleeves of any length."""
    garment = _top(rng, sleeve=rng.choice([rng.uniform(0.25, 0.4), rng.uniform(0.8, 1.0)]), length=rng.uniform(1, 1.2))
    garment.lines += [[(0.03, 0.1), (0.03, 1.0)], [(-0.22, -0.02), (-0.1, 0.14), (0, 0.04)]]
    garment.lines.append([(-x, y) for x, y in garment.lines[-1]])
    garment.dots += [(0.0, float(y)) for y in np.linspace(0.18, 0.95, rng.integers(5, 8))]
    return garment


def _outwear(rng: Generator) -> Shape:
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


def _dress(rng: Generator) -> Shape:
    """A narrow waist and a skirt that is wider than the shoulders; short sleeves or none."""
    waist, hem, length = rng.uniform(0.24, 0.32), rng.uniform(0.55, 0.85), rng.uniform(1.5, 1.9)
    half = [(0.16, 0.0), (0.3, -0.03), (0.38, 0.25), (waist, 0.6), (hem, length)]
    if rng.random() < 0.5:
        half[2:2] = [(0.52, 0.16), (0.44, 0.27)]
    return Shape([_mirrored(half)], [[(-waist, 0.6), (waist, 0.6)]])


def _skirt(rng: Generator) -> Shape:
    waist, hem, length = rng.uniform(0.28, 0.36), rng.uniform(0.5, 0.85), rng.uniform(0.65, 1.1)
    folds = [[(waist * at, 0.1), (hem * at, length)] for at in np.linspace(-0.7, 0.7, rng.integers(2, 7))]
    return Shape([_mirrored([(waist, 0.0), (waist, 0.08), (hem, length)])], [[(-waist, 0.08), (waist, 0.08)], *folds])


def _hat(rng: Generator) -> Shape:
    """A dome, with a brim to both sides or a peak to one."""
    dome = [(0.5 * math.cos(a), 0.5 - 0.45 * math.sin(a)) for a in np.linspace(0, math.pi, 16)]
    reach = rng.uniform(0.75, 1.0)
    both = [(reach, 0.55), (0.6, 0.66), (-0.6, 0.66), (-reach, 0.55), (-0.5, 0.46), (0.5, 0.46)]
    peak = [(0.5, 0.46), (reach, 0.56), (reach, 0.62), (-0.5, 0.56), (-0.5, 0.46)]
    band = [(-0.5, 0.45), (0.5, 0.45)]
    return Shape([dome, both if rng.random() < 0.5 else peak], [band, [(0.0, 0.05), (0.0, 0.45)]])


def _shoes(rng: Generator) -> Shape:
    """A pair from the side, one behind the other, low or up to the ankle; sole and laces."""
    ankle, toe = rng.uniform(0.0, 0.35), rng.uniform(0.85, 1.0)
    shoe = [(-0.6, ankle), (-0.25, ankle - 0.03), (-0.1, 0.42), (0.35, 0.5), (toe, 0.66), (toe, 0.8), (-0.65, 0.8)]
    sole, laces = [(-0.65, 0.72), (toe, 0.72)], [[(x, 0.36 + x / 4), (x + 0.1, 0.52)] for x in (-0.05, 0.07, 0.19)]
    dx, dy = rng.uniform(-0.25, 0.25), rng.uniform(0.5, 0.7)
    other = [[(x + dx, y + dy) for x, y in line] for line in (shoe, sole, *laces)]
    return Shape([shoe, other[0]], [sole, *laces, *other[1:]])


GARMENTS: dict[str, Callable[[Generator], Shape]] = {
    "t-shirt": lambda rng: _top(rng, sleeve=rng.uniform(0.22, 0.36), length=rng.uniform(0.95, 1.15)),
    "pants": lambda rng: _trousers(rng, length=rng.uniform(1.55, 1.9), cuff=rng.uniform(0.13, 0.22)),
    "shoes": _shoes,
    "dress": _dress,
    "hat": _hat,
    "longsleeve": lambda rng: _top(rng, sleeve=rng.uniform(0.8, 1.0), length=rng.uniform(0.95, 1.15)),
    "shorts": lambda rng: _trousers(rng, length=rng.uniform(0.65, 0.9), cuff=rng.uniform(0.3, 0.36)),
    "outwear": _outwear,
    "skirt": _skirt,
    "shirt": _shirt,
}


def _top(rng: Generator, sleeve: float, length: float, wide: float = 1.0) -> Shape:
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
    return Shape([[*right, *reversed(left)]], [[(-neck, 0.0), (0.0, rng.uniform(0.06, 0.2)), (neck, 0.0)], *seams])


def _trousers(rng: Generator, length: float, cuff: float) -> Shape:
    """A waistband, and two legs that part below it."""
    waist, hip, stand = rng.uniform(0.3, 0.36), rng.uniform(0.38, 0.46), rng.uniform(0.0, 0.15)
    crotch = rng.uniform(0.45, 0.55)
    half = [(waist, 0.0), (hip, 0.35), (0.06 + cuff + stand, length), (0.06 + stand, length), (0.0, crotch)]
    details = [[(-waist, 0.08), (waist, 0.08)], [(0.0, 0.08), (0.0, crotch)]]
    details += [[(0.12 * side, 0.08), (0.36 * side, 0.24)] for side in (-1, 1)]
    return Shape([_mirrored(half)], details)


def _mirrored(half: Points) -> Points:
    return [*half, *((-x, y) for x, y in reversed(half))]


# Profiles of cars as (percent of the length, percent of the height), seen from the left side; the front is to the left.
CARS = {
    "sedan": [(0, 32), (2, 50), (26, 58), (40, 97), (50, 100), (66, 97), (82, 65), (98, 60), (100, 30)],
    "hatchback": [(0, 30), (2, 48), (24, 60), (40, 97), (52, 100), (84, 95), (97, 60), (100, 30)],
    "estate": [(0, 30), (2, 48), (25, 58), (38, 96), (46, 100), (90, 98), (98, 62), (100, 30)],
    "van": [(0, 28), (2, 45), (14, 56), (27, 95), (36, 100), (97, 99), (99, 70), (100, 25)],
    "pickup": [(0, 35), (2, 52), (26, 60), (37, 96), (43, 100), (57, 98), (63, 60), (99, 58), (100, 35)],
    "front": [(0, 10), (2, 50), (10, 60), (20, 93), (32, 100), (68, 100), (80, 93), (90, 60), (98, 50), (100, 10)],
}


def car(rng: Generator) -> Shape:
    """A car from one side or, one in four, from the front: body and wheels, with windows, tyres, hubs and lights.

    Lengths are metres on the ground; heights are stretched, for Carvana's photos are squeezed in width.
    """
    kind = "front" if rng.random() < 0.25 else list(CARS)[rng.integers(len(CARS) - 1)]
    front, tall = kind == "front", rng.uniform(1.35, 1.8)
    oblique = rng.uniform(0.7, 1.0)  # how much of the length is seen from a side
    length = 1.9 * rng.uniform(1.3, 1.7) if front else rng.uniform(3.9, 5.0) * oblique
    height = tall * (rng.uniform(1.1, 1.5) + 0.5 * (kind == "van"))
    profile = np.array(CARS[kind]) / 100
    profile[1:-1] += rng.uniform(-0.025, 0.025, (len(profile) - 2, 2))
    profile[:, 0] = np.clip(profile[:, 0] if rng.random() < 0.5 else 1 - profile[:, 0], 0, 1)
    x, y = length * profile[:, 0], -height * profile[:, 1]
    sill = [(length * u, height * rng.uniform(-0.02, 0.02)) for u in np.linspace(1, 0, 9)]
    body = [*zip(x, y, strict=True), *(sill if x[0] < x[-1] else sill[::-1])]
    ground, radius = tall * rng.uniform(0.12, 0.25), rng.uniform(0.29, 0.4)
    if front:
        wheels = [_ellipse(length * u, ground - 0.3 * tall, 0.15, 0.3 * tall) for u in (0.13, 0.87)]
        hubs = []
    else:
        wide = radius * oblique
        at = [length * rng.uniform(*where) for where in ((0.17, 0.21), (0.77, 0.83))]
        wheels = [_ellipse(u, ground - radius * tall, wide, radius * tall) for u in at]
        hubs = [_ellipse(u, ground - radius * tall, 0.6 * wide, 0.6 * radius * tall) for u in at]
    tyre, hub, glass = rng.uniform(0.04, 0.16), rng.uniform(0.3, 0.8), rng.uniform(0.1, 0.6)
    belt = rng.uniform(0.6, 0.66)  # the lower edge of the windows; they follow the roof above it, a little below
    inside = [(px, -min(-py, 0.92 * height)) for px, py in zip(x, y, strict=True) if -py > 0.9 * height]
    low, high = min(px for px, _ in inside), max(px for px, _ in inside)
    window = sorted([(low - 0.05 * length, -belt * height), *inside, (high + 0.05 * length, -belt * height)])
    lit = (0.14, 0.86) if front else (0.03, 0.97)
    lamps = [_ellipse(length * u, -0.42 * height, 0.02 * length, 0.05 * height) for u in lit]
    panels = [(window, glass), *((wheel, tyre) for wheel in wheels), *((disc, hub) for disc in hubs)]
    doors = [] if front else [[(length * u, -0.12 * height), (length * u, -0.9 * height)] for u in (0.42, 0.63)]
    panels += [(lamp, 0.9) for lamp in lamps]
    return Shape([body, *wheels], doors, panels=panels, fills=(0.38, 0.6) if front else (0.5, 0.85))


def _ellipse(cx: float, cy: float, rx: float, ry: float) -> Points:
    return [(cx + rx * math.cos(angle), cy + ry * math.sin(angle)) for angle in np.linspace(0, 2 * math.pi, 20)]
