"""Where the wall time goes beside computing: loaders, padding, slow iterations, between epochs, cores, a late rank."""

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
from ..summary import ESTIMATE, MEASURED, Finding, Kind, milliseconds

OWN_RULES = (  # activities that are findings of their own
    stacks.EVALUATING, stacks.SAVING, stacks.DRAWING, stacks.LOGGING, stacks.COMPILING, stacks.LOADING, stacks.DATASET,
)  # fmt: skip
LEAST_CORES, LEAST_WAIT = 0.15, 0.1  # cores that workers use, and the share of the time that the step waits for one
WAITS = 0.1  # of the time for the loader: then nobody can say that the workers are too many
LATE, LATE_SEEN_S = 0.1, 0.25  # of an iteration; looks at each rank for less tell nothing
_TOGETHER = re.compile(r"\.wait\(|barrier\(|all_reduce|all_gather|reduce_scatter|broadcast|\.(send|recv)\(")
LEAST_PADDING, LEAST_LOADING = 0.05, 0.05  # shares of the positions and of the time
ANEW = 0.5  # of iterations in which a loader begins anew
# Calls that open or build what a worker could keep, where the line that loads a sample makes them
_OPENS = re.compile(
    r"\b(np\.load|torch\.load|File|tarfile\.open|ZipFile|lmdb\.open|zarr\.open|sqlite3\.connect|safe_open|ParquetFile"
    r"|from_pretrained|Dataset|(pd|pandas)\.read_\w+|xr\.open_\w+)\("
)


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
        yield loop.finding(name, share, quoted(file, line), evidence, ESTIMATE, kinds={kind.name: share})


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
    yield loop.finding("workers on the step's cores", share, where, evidence, ESTIMATE, case, _waiting(loop, share))


def too_many_threads(loop: Loop, share: float, evidence: str) -> Finding:
    """Of workers that each have several threads, by the line that sets their number."""
    where = quoted(*at) if (at := loop.observation.worker_threads_at) else "the loader"
    evidence += (
        f"; each of {workers(loop)} workers has {loop.observation.worker_threads} threads, on {cores(loop)} cores"
    )
    kinds = _waiting(loop, share)
    return loop.finding("workers on the step's cores", share, where, evidence, ESTIMATE, "threads", kinds)


def workers(loop: Loop) -> int:
    return max(len(loop.observation.cores.get("workers", ())), 1)


def cores(loop: Loop) -> int:
    return int(loop.observation.cores.get("cores", os.cpu_count() or 1))


def _waiting(loop: Loop, share: float) -> dict[str, float]:
    """How much of it is the step's wait for a core."""
    return {NO_CORE: min(next((kind.share for kind in loop.kinds if kind.name == NO_CORE), 0.0), share)}


def loader(loop: Loop) -> Iterator[Finding]:
    waits, inside = loop.activities[stacks.LOADING], loop.activities[stacks.DATASET]
    if waits + inside < LEAST_LOADING:
        return
    evidence = f"{waits + inside:.0%} of the time until a batch is there"
    for file, line, often in loop.observation.loaders:
        if often >= ANEW:
            evidence = f"{often:.2g} times an iteration a loader begins anew; {evidence}"
            yield loop.finding("new loader each batch", waits + inside, quoted(file, line), evidence, ESTIMATE)
    worker_lines, kinds = loop.observation.workers, loop.beyond(stacks.LOADING, stacks.DATASET)
    if (threads := loop.observation.worker_threads) > 1 and threads * workers(loop) > cores(loop):
        yield too_many_threads(loop, waits + inside, evidence)
    if not inside and kinds.get(EPOCHS, 0.0) > (waits + inside) / 2:
        evidence += f", most of it when an epoch begins{loop.mostly(kinds, waits + inside)}"
        where, case = loop.dearest(stacks.LOADING), "each epoch"
    elif inside:
        where = _loads(loop)
        evidence += f", {inside:.0%} of it in the dataset's own lines, in the process that trains"
        case = "in the dataset"
    else:
        where, case = loop.dearest(stacks.LOADING), "observed"
        if worker_lines:
            file, line, seconds = worker_lines[0]
            where = quoted(file, line)
            evidence += f"; that line has {seconds / sum(each for *_, each in worker_lines):.0%} of the workers' time"
    case = "opened" if _OPENS.search(where) else case
    yield loop.finding("waiting for the loader", waits + inside, where, evidence, case=case, kinds=kinds)


def _loads(loop: Loop) -> str:
    """The line that has half of what the dataset does, or opens a file; else the innermost that most passes through."""
    lines = by_line(loop.table[loop.table["activity"] == stacks.DATASET])
    dearest = quoted(*lines.index[0])
    spread = lines.iloc[0] < lines.sum() / 2 and not _OPENS.search(dearest)
    return quoted(*loop.observation.loads) if spread and loop.observation.loads else dearest


def padding(loop: Loop) -> Iterator[Finding]:
    positions, padded, shared = loop.observation.padding or (1, 0, 0)
    if padded / positions < LEAST_PADDING:
        return
    share = padded / positions * (loop.activities[stacks.COMPUTING] + loop.activities[stacks.BACKWARD])
    evidence = f"{padded / positions:.0%} of the positions that embeddings get are constant ends of rows"
    case = ""
    if shared >= LEAST_PADDING * positions:
        evidence += f", {shared / positions:.0%} beyond the longest sample of their batch"
        case = "fixed"
    where = quoted(*at) if (at := loop.observation.padded_at) else "the collate function or the tokenizer"
    yield loop.finding("padding", share, where, evidence, ESTIMATE, case)


RULES = (loader, padding, slow_iterations, busy_cores)


def late_rank(ranks: Mapping[int, Observation]) -> tuple[int, list[Finding]]:
    """The rank whose own work, outside of backward and collectives, takes longest, as the others wait for it.

    Its line is the one that takes most more than in the other ranks. The rank's number; -1 if none is late.
    """
    own = {rank: _own_ms(Loop(seen)) for rank, seen in ranks.items() if seen.iterations and seen.seconds > LATE_SEEN_S}
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
