"""The paired trial of two programs, as the columns of a record."""

import os
import time
from collections.abc import Sequence

import numpy as np

from .. import STATUS, Row, ceilings
from ..cpu import keeps_pages
from ..estimate import AT_A_LOOK, LEAST_PAIRS, MOST_LOOKS, estimate
from . import programs
from .programs import Program, start_noise

TURN_S, TURN_STEPS = 0.05, 4  # a turn's least length, in seconds and in steps
# As many steps are left out before: where a turn begins, queues and prefetched batches are full. Of steps so long that
# a turn would take longer than this, it has fewer.
LONG_S = 2.0
STARTS = 4  # that the seconds of a trial are divided among


def trial(
    baseline: Program,
    program: Program,
    *,
    seconds: float = 60.0,
    drop: int = TURN_STEPS,
    turn_steps: int = TURN_STEPS,
    wanted: int = STARTS,
    starts: list[list[float]] | None = None,
) -> Row:
    """Let two programs take turns until it is decided or `seconds` are spent: the columns of a record.

    The first `drop` steps of a turn don't count; programs that prefetch and queue nothing need none. The seconds are
    divided among `wanted` starts, of which two take place in any case; after each it is looked whether the trial has
    `enough`, and while there are seconds an undecided one goes on, up to nine starts. A pair during which others used
    more than `LOADED` cores is dropped. A program that ends no turn in `SILENCE_S` is taken to hang. Whatever happens,
    no process of theirs is left. Both must fit into memory at once.

    `ended` says why it ended: decided, or when its seconds or starts were spent. `dropped` pairs were measured beside
    others' work. `starts` is filled with the log ratios of each start's pairs. The machine's fp32 products had the rate
    `matmul_before` and `matmul_after` (TFLOP/s). `luck` is what a start is taken to add: much on a CPU, unless both
    programs keep the pages of freed memory.
    Without an estimate there is only a `status`, which says why.
    """
    rate_before = ceilings.rate_beside()
    kept = all(keeps_pages(os.environ | dict(side.environment)) for side in (baseline, program))
    start_luck = start_noise(kept)
    began = time.monotonic()
    turn = {"drop": drop, "seconds": TURN_S, "steps": turn_steps}
    starts = [] if starts is None else starts
    before: list[float] = []
    after: list[float] = []
    dropped, result, enough = 0, None, False
    while not enough and len(starts) <= MOST_LOOKS:
        share = (seconds - (time.monotonic() - began)) / max(wanted - len(starts), 1)
        order = -1 if len(starts) % 2 else 1  # each of them begins every other start
        try:
            *of_sides, lost = _one_start([baseline, program][::order], share, turn)
        except programs.ProgramError as error:
            return {STATUS: str(error)}
        ours, theirs = of_sides[::order]
        before, after, dropped = before + ours, after + theirs, dropped + lost
        starts.append(programs.log_ratios(ours, theirs))
        result, spent = estimate(starts, start_luck, AT_A_LOOK), time.monotonic() - began
        if len(starts) < min(wanted, 2):
            continue
        enough = result is not None and result.enough
        if spent + spent / len(starts) > seconds:
            break
    if result is None:
        why = f"{dropped} pairs beside others' work" if dropped else f"turns too long for {seconds:.0f} s"
        return {STATUS: f"too few pairs, {LEAST_PAIRS} are needed: {why}"}
    ours_ms, theirs_ms = (float(np.median(seconds)) * 1e3 for seconds in (before, after))
    times = {"median_ms": theirs_ms, "baseline": baseline.name, "baseline_ms": ours_ms}
    rates = {"matmul_before": rate_before, "matmul_after": ceilings.rate_beside()}
    machine = {"luck": start_luck, "dropped": dropped} | rates
    return times | result.row() | {"ended": "decided" if enough else "time"} | machine


def _one_start(sides: Sequence[Program], seconds: float, turn: dict) -> tuple[list[float], list[float], int]:
    """One life of both: the seconds of each one's steps, pair by pair, and how many pairs others disturbed."""
    deadline = time.monotonic() + seconds
    with programs.living(sides, programs.SILENCE_S) as (first, second):
        steps = max(1, min(turn["steps"], round(LONG_S / first.take(turn))))  # fewer where they are long
        second.take(turn)  # as many steps to settle as the first one had
        return programs.take_pairs(first, second, turn | {"drop": min(turn["drop"], steps), "steps": steps}, deadline)
