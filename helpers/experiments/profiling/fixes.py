"""What each fix of the two loops gains, alone and after the others."""

import itertools
import statistics
from collections import Counter

from helpers.lab import Timing, device, experiment
from helpers.lab.cpu import KEPT
from helpers.lab.process import in_fresh_process
from helpers.lab.records import Row
from helpers.lab.timing import between_ms, moment, synchronize
from helpers.profiling.account import IDLE, device_account

from .loops import SIZES
from .planted_faults import (
    FIXED,
    NOT_ON_CPU,
    PIPELINES,
    SLOW,
    fixes_of,
    options,
    trace_of,
    within_an_epoch,
    workers,
)

ALONE, CUMULATIVE = "alone", "cumulative"
# A fix that isn't in the loop: glibc returns large freed blocks to the system, which zeroes their pages once more when
# they are asked for again, unless the process's environment (`KEPT`) says otherwise.
KEPT_PAGES = "kept_pages"
FRESH = 4  # steps to settle in a new process
TIMED = {"small": (1, 2), "cpu": (1, 3), "gpu": (5, 20), "full": (5, 20)}  # steps of a block: to settle, timed
FIX_COLUMNS = (
    "median_ms p20_ms p80_ms n mean_ms us_per_target baseline baseline_us_per_target speedup prepare_s source "
    "device_idle_share?"
)


def _fix_rows(pipeline: str, size: str) -> list[Row]:
    """Each fix alone, and one more at a time; on a CPU without those that need a GPU or aren't in a step."""
    names = [switch.name for switch in PIPELINES[pipeline].switches if size in ("gpu", "full") or switch.on_cpu]
    names = {"small": names[-1:], "cpu": [*names, KEPT_PAGES]}.get(size, names)
    together = [name for name in names if size != "cpu" or name not in NOT_ON_CPU[pipeline]]
    pairs = [(ALONE, name) for name in names] + [(CUMULATIVE, name) for name in together]
    return [{"size": size, "variant": variant, "fix": name} for variant, name in pairs]


@experiment(
    **{name: _fix_rows("vit", size) for name, size in SIZES.items()},
    version=2,
    columns=FIX_COLUMNS,
    same_work=False,  # workers deliver in bursts
)
def vit_fixes(size: str, variant: str, fix: str) -> Row:
    """The ViT on photos: each fix alone, and one more at a time, against the slow loop beside it."""
    return _fixed("vit", size, variant, fix)


@experiment(
    **{name: _fix_rows("gpt", size) for name, size in SIZES.items()},
    version=2,
    columns=FIX_COLUMNS,
    same_work=False,  # lengths differ from batch to batch
)
def gpt_fixes(size: str, variant: str, fix: str) -> Row:
    """The language model: each fix alone, and one more at a time, against the slow loop beside it."""
    return _fixed("gpt", size, variant, fix)


def _fixed(pipeline: str, size: str, variant: str, fix: str) -> Row:
    """A block of steps of the slow loop between two of the fixed one; times are for a real target (photo or token).

    Within a block a loader's workers run ahead of their own loop only. They deliver in bursts, so times are means. A
    packed step has other samples than a padded one, so a step's time alone wouldn't compare them. The idle share comes
    from a separate profile on a GPU.
    """
    switched = PIPELINES[pipeline]
    names = [switch.name for switch in switched.switches] + [KEPT_PAGES]
    fixes = frozenset([fix] if variant == ALONE else names[: names.index(fix) + 1])
    if size == "cpu" and variant == CUMULATIVE:
        fixes = fixes & (fixes_of(pipeline, FIXED, size) | {KEPT_PAGES})
    times: dict[str, list[float]] = {fix: [], SLOW: []}
    targets: Counter = Counter()
    for name, chosen in ((fix, fixes), (SLOW, frozenset()), (fix, fixes)):
        if KEPT_PAGES in chosen:
            done = in_fresh_process(_block, pipeline, chosen - {KEPT_PAGES}, size, FRESH, environment=KEPT)
        else:
            done = _block(pipeline, chosen, size)
        samples, real, source, prepare_s = done
        times[name] += samples
        targets[name] += real
    per_target = {name: sum(samples) * 1e3 / targets[name] for name, samples in times.items()}
    on_gpu = device().type == "cuda" and variant == CUMULATIVE
    return Timing.of(times[fix]).row() | {
        "mean_ms": statistics.mean(times[fix]),
        "us_per_target": per_target[fix],
        "baseline": SLOW,
        "baseline_us_per_target": per_target[SLOW],
        "speedup": per_target[SLOW] / per_target[fix],
        "prepare_s": prepare_s,
        "source": source,
        "device_idle_share": device_account(trace_of(switched, fixes, size)).shares[IDLE] if on_gpu else None,
    }


def _block(name: str, fixes: frozenset[str], size: str, settling: int = 0) -> tuple[list[float], int, str, float]:
    """Milliseconds of steps of an epoch, loading included, after some to settle; their real targets; about the task."""
    pipeline = PIPELINES[name]
    ahead, (least, timed) = workers(pipeline, fixes, size), TIMED[size]
    settling = max(settling, least, ahead)
    count = settling + max(timed, 4 * ahead)
    taken = options(pipeline, size) | within_an_epoch(pipeline, count, size)
    trainer = pipeline.prepare(fixes, **taken)
    marks, real = [], []
    with trainer.settings():
        marks.append(moment())
        for batch in itertools.islice(trainer.epoch(0), count):
            trainer.step(batch)
            marks.append(moment())
            real.append(batch.real)
        synchronize()
    times = [between_ms(*pair) for pair in itertools.pairwise(marks[settling:])]
    return times, sum(real[settling:]), trainer.task.source, trainer.task.prepare_s
