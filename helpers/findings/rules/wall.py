"""Where the wall time goes that no ordinary step takes: slow iterations, what is between epochs, cores, a late rank."""

import os
import re
import statistics
from collections.abc import Iterator, Mapping

import pandas as pd

from ...script import stacks
from ...script.iterations import EPOCHS, NO_CORE, PHASE, SLOW
from ...script.observation import Observation
from ...script.stacks import quoted, source
from ..loop import Loop, by_line
from ..summary import BOUND, MEASURED, Finding, Kind, milliseconds

OWN_RULES = (  # activities that are findings of their own
    stacks.EVALUATING, stacks.SAVING, stacks.DRAWING, stacks.LOGGING, stacks.COMPILING, stacks.LOADING, stacks.DATASET,
)  # fmt: skip
LEAST_CORES, LEAST_WAIT = 0.15, 0.1  # cores that workers use, and the share of the time that the step waits for one
WAITS = 0.1  # of the time for the loader: then nobody can say that the workers are too many
LATE = 0.1  # of an iteration
_TOGETHER = re.compile(r"\.wait\(|barrier\(|all_reduce|all_gather|reduce_scatter|broadcast|\.(send|recv)\(")


def slow_iterations(loop: Loop) -> Iterator[Finding]:
    """What a line of no known kind does in some iterations only, or at an epoch's end."""
    for kind in loop.kinds[1:]:
        own = 1 - sum(kind.spent.get(name, 0.0) for name in OWN_RULES) / max(kind.share, 1e-9)
        share = kind.share * own - kind.collected
        if kind.name in (NO_CORE, PHASE) or kind.where is None or share <= 0:
            continue
        file, line, function = kind.where
        evidence = f"{loop.often(kind)}; most of that passes through {function}"
        name = "work between epochs" if kind.name == EPOCHS else "slow steps"
        yield loop.finding(name, share, quoted(file, line), evidence, BOUND, kinds={kind.name: share})


def unseen(loop: Loop, kind: Kind, share: float) -> str:
    """What of a kind no finding explains, in words."""
    return f"{share:.0%} {'in ' if kind.name == SLOW else ''}{kind.name} whose cause wasn't seen: {loop.often(kind)}"


def busy_cores(loop: Loop) -> Iterator[Finding]:
    """Workers, or processes of the script's, that have the cores which the step needs, though nobody waits for them."""
    used, waits = loop.observation.cores, loop.activities[stacks.LOADING]
    loading, children = sum(used.get("workers", [])), used.get("children", 0.0)
    if loading + children < LEAST_CORES or waits > WAITS:
        return
    without = min(used["waited"], 1 - used["main"]) * (1 - loop.strangers)
    share = without / max(1 - min(used["waited"], 1 - used["main"]) * loop.strangers, 0.1)
    if share < LEAST_WAIT:
        return
    evidence = f"{workers(loop)} workers use {loading:.2g} of {cores(loop)} cores" if loading else ""
    if children >= LEAST_CORES:
        evidence += f"{' and ' if evidence else ''}processes that the script started {children:.2g} cores"
    evidence += f"; the step's threads wait for a core {share:.0%} of the time, and for a batch {waits:.0%}"
    if loading >= children and loop.observation.worker_threads > 1:
        yield too_many_threads(loop, share, evidence)
        return
    where, case = "processes that the script started", "processes"
    if loading >= children:
        where, case = (quoted(*loop.observation.workers[0][:2]) if loop.observation.workers else "the loader"), ""
    yield loop.finding("workers on the step's cores", share, where, evidence, BOUND, case, _waiting(loop, share))


def too_many_threads(loop: Loop, share: float, evidence: str) -> Finding:
    """Of workers that each have several threads, by the line that sets their number."""
    where = quoted(*at) if (at := loop.observation.worker_threads_at) else "the loader"
    evidence += (
        f"; each of {workers(loop)} workers has {loop.observation.worker_threads} threads, on {cores(loop)} cores"
    )
    kinds = _waiting(loop, share)
    return loop.finding("workers on the step's cores", share, where, evidence, BOUND, "threads", kinds)


def workers(loop: Loop) -> int:
    return max(len(loop.observation.cores.get("workers", ())), 1)


def cores(loop: Loop) -> int:
    return int(loop.observation.cores.get("cores", os.cpu_count() or 1))


def _waiting(loop: Loop, share: float) -> dict[str, float]:
    """How much of it is the step's wait for a core."""
    return {NO_CORE: min(next((kind.share for kind in loop.kinds if kind.name == NO_CORE), 0.0), share)}


RULES = (slow_iterations, busy_cores)


def late_rank(ranks: Mapping[int, Observation]) -> tuple[int, list[Finding]]:
    """The rank whose own work, outside of backward and collectives, takes longest, as the others wait for it.

    Its line is the one that takes most more than in the other ranks. The rank's number; -1 if none is late.
    """
    own = {rank: _own_ms(Loop(seen)) for rank, seen in ranks.items() if seen.iterations}
    if len(own) < 2:
        return -1, []
    last = max(own, key=lambda rank: own[rank].sum())
    loop, late_ms = Loop(ranks[last]), own[last].sum()
    others = [lines for rank, lines in own.items() if rank != last]
    usual_ms = statistics.median(lines.sum() for lines in others)
    if (share := (late_ms - usual_ms) / loop.step_ms) < LATE:
        return -1, []
    usual = pd.concat(others).groupby(level=[0, 1]).sum() / len(others)
    more = own[last].sub(usual, fill_value=0.0).sort_values(ascending=False)
    evidence = f"rank {last} is late: {milliseconds(late_ms)} an iteration of its own work"
    evidence += f"; the others' take {milliseconds(usual_ms)} and wait for it"
    return last, [loop.finding("late rank", share, quoted(*more.index[0]), evidence, MEASURED)]


def _own_ms(loop: Loop) -> pd.Series:
    """Milliseconds an iteration of each line but for those in which ranks wait for each other."""
    together = loop.table["activity"].isin((stacks.BACKWARD, stacks.COMMUNICATING))
    waiting = [bool(_TOGETHER.search(source(row.file, row.line))) for row in loop.table.itertuples()]
    return by_line(loop.table[~together & ~pd.Series(waiting, index=loop.table.index, dtype=bool)]) * loop.step_ms
