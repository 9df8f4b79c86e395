"""The inefficiencies of a training that is slow on purpose, and their fixes, as named switches: a table each in
`switches.toml`.

A training runs with a frozenset of the names of its fixes: the empty set is all slow. A task's switches are in the
order in which fixes are accumulated.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass
from pathlib import Path


@dataclass(frozen=True)
class Switch:
    """One inefficiency and its fix, and what else the fix changes."""

    name: str
    fault: str = (
        ""  # what `Faults` call it while it isn't fixed; "" if the precision or an option of the trainer fixes it
    )
    slow: str = ""  # what the loop does without the fix
    changes: str | None = None  # what the fix changes beside the time; None: the same numbers up to rounding
    optional: bool = False  # an optimization beyond the loop's inefficiencies; left out of `fixed`
    on_cpu: bool = True  # a CPU's steps show it, too


def check_names(names: Iterable[str], valid: Iterable[str], one: str, many: str) -> frozenset[str]:
    """The names as a frozenset, if all of them are valid; `one` and `many` say what they name."""
    if isinstance(names, str):
        raise ValueError(f"{many} is {names!r}; it must be a set of names, such as {{{names!r}}}")
    valid, chosen = list(valid), frozenset(names)
    if unknown := sorted(chosen.difference(valid)):
        raise ValueError(f"unknown {one} {unknown[0]!r}; valid: {', '.join(valid)}")
    return chosen


_ENTRIES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _named(names: str) -> tuple[Switch, ...]:
    return tuple(Switch(name, **_ENTRIES[name]) for name in names.split())


LANGUAGE = _named("""
    token_cache workers pinned short_padding packed bf16 width_1024 vocabulary_64 fused_qkv fused_attention
    no_dead_projection positions_once fused_loss inference_mode no_item streaming_accuracy fused_optimizer set_to_none
    any_algorithm compile
""")
CLOTHES = _named("""
    workers pinned uint8_transfer single_cut decode_once width_256 fused_qkv fused_attention conv_patches inference_mode
    no_item streaming_metrics fused_optimizer set_to_none cudnn_benchmark constants_once keep_memory bf16
    photos_on_device compile cuda_graph
""")

_FAULTS = dict.fromkeys(switch.fault for switch in (*LANGUAGE, *CLOTHES) if switch.fault)
# The faults that a training has, True, or doesn't have. By default None: torch's settings are left as they are, too.
Faults = make_dataclass("Faults", [(name, bool | None, None) for name in _FAULTS], frozen=True, kw_only=True)
NO_FAULTS = Faults()
