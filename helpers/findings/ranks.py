"""Profiles of the ranks of one run: which rank do the others wait for in collectives?"""

from pathlib import Path
from statistics import median

from .account import is_collective
from .summary import milliseconds
from .trace import Note, Trace
from .trace_file import read_trace

APART = 0.1  # of the median time in collectives: less is no straggler


def last_to_arrive(files: list[Path]) -> tuple[Path, Trace, list[Note]]:
    """The rank that spends the least time in collectives, as it arrives last: its file and trace, and a note.

    A ValueError if the files aren't profiles of the ranks of one run.
    """
    paths: dict[int, Path] = {}
    spent = {}
    for path in files:
        trace = read_trace(path)
        rank, world = _identity(trace, path)
        if rank in paths:
            raise ValueError(f"{paths[rank].name} and {path.name} are both of rank {rank}: one run is needed")
        paths[rank] = path
        spent[rank] = sum(e.us for e in trace.device if is_collective(e)) / len(trace.steps) / 1e3
        if min(spent, key=spent.__getitem__) == rank:
            last, of_last = rank, trace  # of no other: each takes much memory
    middle = median(spent.values())
    if not middle or middle - spent[last] < APART * middle:
        each = f"; in collectives all spend about the same, {milliseconds(middle)} a step" if middle else ""
        text = f"{len(paths)} of {world} ranks{each}; this is rank {last}"
    else:
        text = (
            f"rank {last} is the last to arrive: {milliseconds(spent[last])} a step in collectives, where the median "
            f"of {len(paths)} ranks is {milliseconds(middle)}, most of it waiting; this is its account"
        )
    return paths[last], of_last, [Note("ranks", text)]


def _identity(trace: Trace, path: Path) -> tuple[int, int]:
    """(rank, number of ranks) as the profile says."""
    about = trace.about.get("distributedInfo", {})
    if not about.keys() >= {"rank", "world_size"}:
        raise ValueError(f"{path.name} doesn't say of which rank it is: pass one file rather than the folder")
    return about["rank"], about["world_size"]
