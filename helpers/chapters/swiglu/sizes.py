"""Names and shapes that the chapter's tables share."""

from ...lab import Row
from ...swiglu import LEVELS

NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
LEVEL = "checkpoint_level"
TIME_COLUMNS = ("median_ms", "p20_ms", "p80_ms", "n")


def shapes(names: str, *values: tuple) -> list[Row]:
    return [dict(zip(names.split(), value, strict=True)) for value in values]


def at_each_level(configs: list[Row]) -> list[Row]:
    return [config | {LEVEL: level} for config in configs for level in LEVELS]
