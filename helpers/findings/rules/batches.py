"""What a batch costs before the step begins: rules from a `Loop` to findings on the loader, and on its padding."""

import re
from collections.abc import Iterator

from ...script import stacks
from ...script.iterations import EPOCHS
from ...script.stacks import quoted
from ..loop import Loop, by_line
from ..summary import BOUND, Finding
from . import wall

LEAST_PADDING, LEAST_LOADING = 0.05, 0.05  # shares of the positions and of the time
ANEW = 0.5  # of iterations in which a loader begins anew
# Calls that open or build what a worker could keep, where the line that loads a sample makes them
_OPENS = re.compile(
    r"\b(np\.load|torch\.load|File|tarfile\.open|ZipFile|lmdb\.open|zarr\.open|sqlite3\.connect|safe_open|ParquetFile"
    r"|from_pretrained|Dataset|(pd|pandas)\.read_\w+|xr\.open_\w+)\("
)


def loader(loop: Loop) -> Iterator[Finding]:
    waits, inside = loop.activities[stacks.LOADING], loop.activities[stacks.DATASET]
    if waits + inside < LEAST_LOADING:
        return
    evidence = f"{waits + inside:.0%} of the time until a batch is there"
    for file, line, often in loop.observation.loaders:
        if often >= ANEW:
            evidence = f"{often:.2g} times an iteration a loader begins anew; {evidence}"
            yield loop.finding("new loader each batch", waits + inside, quoted(file, line), evidence, BOUND)
    workers, kinds = loop.observation.workers, loop.beyond(stacks.LOADING, stacks.DATASET)
    if (threads := loop.observation.worker_threads) > 1 and threads * wall.workers(loop) > wall.cores(loop):
        yield wall.too_many_threads(loop, waits + inside, evidence)
    if not inside and kinds.get(EPOCHS, 0.0) > (waits + inside) / 2:
        evidence += f", most of it when an epoch begins{loop.mostly(kinds, waits + inside)}"
        where, case = loop.dearest(stacks.LOADING), "each epoch"
    elif inside:
        where = _loads(loop)
        evidence += f", {inside:.0%} of it in the dataset's own lines, in the process that trains"
        case = "in the dataset"
    else:
        where, case = loop.dearest(stacks.LOADING), "observed"
        if workers:
            file, line, seconds = workers[0]
            where = quoted(file, line)
            evidence += f"; that line has {seconds / sum(each for *_, each in workers):.0%} of the workers' time"
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
    yield loop.finding("padding", share, where, evidence, BOUND, case)


RULES = (loader, padding)
