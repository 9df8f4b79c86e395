"""Faults planted one or two at a time into the fixed pipelines, and the loops timed side by side.

    pipeline, fixed = PIPELINES["gpt"], fixes_of("gpt", FIXED, "cpu")
    times = side_by_side("gpt", {"planted": planted("gpt", {"bf16"}, "cpu"), "fixed": fixed}, "cpu")

`size` is a preset of the pipelines.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from ...book.values import Number, lacking
from ...findings.trace import Trace
from ...findings.trace_file import read_trace
from ...lab import Row, device
from ...lab.timing import between_ms, moment, synchronize
from ...pictures import cores, local_photos
from ...text import local_wikitext
from ...training.switched import CLOTHES, LANGUAGE, Switched
from ...training.task import TaskTrainer
from ...training.trainer import WARM_UP

PIPELINES: dict[str, Switched] = {"vit": CLOTHES, "gpt": LANGUAGE}
SLOW, FIXED = "slow", "fixed"
LOOPS = [{"pipeline": pipeline, "variant": variant} for pipeline in PIPELINES for variant in (SLOW, FIXED)]
SIZES = {"small": "small", "cpu": "cpu", "gpu": "gpu", "big_gpu": "full"}  # class of machine -> the pipelines' size
NAMES = {"vit": "ViT", "gpt": "language model"}
# Slower on a CPU, timed alone only: with products in bf16 fused attention's backward is slow; workers take a core
# from a language model whose batches cost little to make.
NOT_ON_CPU: dict[str, set[str]] = {"vit": {"fused_attention"}, "gpt": {"workers"}}
# Later fixes that would hide a fault: they are left out where it is planted.
HIDING: dict[str, dict[str, set[str]]] = {
    "vit": {"decode_once": {"photos_on_device", "workers"}},
    "gpt": {"short_padding": {"packed"}},
}
# Rounds, and steps of a block: on a GPU at most, it has as many as take `BLOCK_S`
ROUNDS = {"small": (1, 1), "cpu": (5, 3), "gpu": (4, 10), "full": (4, 10)}
BLOCK_S = 0.3


def fixes_of(pipeline: str, variant: str, size: str) -> frozenset[str]:
    """All fixes, or none; on a CPU without those that make it slower."""
    left_out = NOT_ON_CPU[pipeline] if size == "cpu" else set()
    return frozenset() if variant == SLOW else PIPELINES[pipeline].fixed - left_out


def planted(pipeline: str, lacking: Iterable[str], size: str) -> frozenset[str]:
    """The fixes of the loop that lacks these, and so has their faults and no others."""
    hiding = [HIDING[pipeline].get(fix, set()) for fix in lacking]
    return fixes_of(pipeline, FIXED, size).difference(lacking, *hiding)


class Block(NamedTuple):
    """Milliseconds of so many steps, loading included, and their real targets."""

    ms: float
    real: int
    steps: int


Enough = Callable[[dict[str, list[Block]]], bool]


def side_by_side(
    pipeline: str, loops: dict[str, frozenset[str]], size: str, rounds: int = 0, enough: Enough = lambda times: False
) -> dict[str, list[Block]]:
    """The blocks of each loop's steps; the loops take turns, there and back, for `rounds` or until it is `enough`.

    Without `rounds` it is as many as `ROUNDS` says. All loops get the same samples in one order. A loader's workers
    run ahead while other loops have their turn, so what they have made until then isn't timed.
    """
    switched, (few, most) = PIPELINES[pipeline], ROUNDS[size]
    rounds = rounds or few
    at_once = {name: workers(switched, fixes, size) for name, fixes in loops.items()}
    count = (rounds + 2) * (most + 2 * max(at_once.values()))
    trainers = {name: switched.prepare(fixes, **options(switched, size, count)) for name, fixes in loops.items()}
    prepared = {name: (trainer, iter(trainer.epoch(0))) for name, trainer in trainers.items()}
    times: dict[str, list[Block]] = {name: [] for name in loops}
    steps = most
    for turn in range(rounds + 1):
        for name in list(loops)[:: 1 if turn % 2 else -1]:
            if turn:
                times[name].append(_block(*prepared[name], steps, 2 * at_once[name]))
            else:  # to warm up, and to capture
                _block(*prepared[name], min(most, WARM_UP + 1), 2 * at_once[name])
        if not turn and size in ("gpu", "full"):
            slowest_ms = max(_block(*of, 1, 0).ms for of in prepared.values())
            steps = block_steps(slowest_ms, max(at_once.values()), most)
        if turn and enough(times):
            break
    return times


def block_steps(step_ms: float, workers: int, most: int) -> int:
    """As many steps as take `BLOCK_S`, and as there are workers, whose batches come in bursts."""
    return max(min(most, math.ceil(BLOCK_S * 1e3 / step_ms)), workers)


def _block(trainer: TaskTrainer, batches: Any, steps: int, untimed: int) -> Block:
    with trainer.settings():
        for batch in itertools.islice(batches, untimed):
            trainer.step(batch)
        synchronize()
        began, real = moment(), 0
        for batch in itertools.islice(batches, steps):
            trainer.step(batch)
            real += batch.real
        ended = moment()
        synchronize()
        return Block(between_ms(began, ended), real, steps)


def trace_of(pipeline: Switched, fixes: frozenset[str], size: str, detailed: bool = False) -> Trace:
    """The trace of a few steps within one epoch. `detailed` adds shapes and source lines, and slows the host."""
    profiles: list[profile] = []
    on_gpu = device().type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    ahead = workers(pipeline, fixes, size) if on_gpu else 0
    wait, active = max(ahead, 1), max(ahead, 4)  # with workers a complete burst, after the first

    def profile_steps(_model: nn.Module) -> profile:
        steps = schedule(wait=wait, warmup=2, active=active, repeat=1)
        profiles.append(profile(activities=activities, schedule=steps, record_shapes=detailed, with_stack=detailed))
        return profiles[0]

    steps = wait + active + 3
    pipeline.run(fixes, steps=steps, validates=False, profile=profile_steps, **options(pipeline, size, steps))
    return read_trace(profiles[0])


def options(pipeline: Switched, size: str, steps: int = 0) -> dict[str, Any]:
    """The preset, and the data: WikiText where `$HELPERS_WIKITEXT` names it, photos where `$HELPERS_PHOTOS` does.

    With `steps` also what makes an epoch have so many, as workers start anew in the next.
    """
    local = local_wikitext if pipeline is LANGUAGE else local_photos
    taken: dict[str, Any] = {"preset": size, "path": local() if size != "small" else None}
    if not steps:
        return taken
    preset = pipeline.sizes[size]
    needed = preset["batch_size"] * (steps + 2)
    if "passes" in preset:
        return taken | {"passes": -(-needed // preset["samples"])}
    return taken | {"samples": max(preset["samples"], needed)}


def workers(pipeline: Switched, fixes: frozenset[str], size: str) -> int:
    """How many worker processes make batches."""
    makes = "workers" in fixes and "photos_on_device" not in fixes
    return min(pipeline.sizes[size]["workers"], cores()) if makes else 0


def sized(size: str, rows: list[Row]) -> list[Row]:
    return [{"size": size} | row for row in rows]


def by_variant(numbers: dict[tuple[str, str], Number], pipeline: str, unit: str = "") -> SimpleNamespace:
    """The numbers of a pipeline's slow and fixed loop."""
    absent = lacking(f"the {NAMES[pipeline]}'s loops", unit)
    return SimpleNamespace(**{variant: numbers.get((pipeline, variant), absent) for variant in ("slow", "fixed")})
