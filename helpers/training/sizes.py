"""The sizes of the trainings, by preset, from `sizes.toml`."""

import tomllib
from pathlib import Path
from typing import Any


def sizes_of(training: str) -> dict[str, dict[str, Any]]:
    """preset -> sizes, those of `base` where a preset has no others."""
    with Path(__file__).with_suffix(".toml").open("rb") as file:
        presets = tomllib.load(file)[training]
    base = presets.pop("base")
    return {name: base | sizes for name, sizes in presets.items()}
