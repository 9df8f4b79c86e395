"""Profiles of the ranks of one run: which rank do the others wait for in collectives?"""

from pathlib import Path
from statistics import median

from .account import is_collective
from .diagnosis import milliseconds
from .read_trace import read_trace
from .trace import Note, Trace

APART = 0.1  # of the median time in collectives: less is no straggler


def last_to_arrive(files: list[Path]) -> tuple[Path, Trace, list[Note]]:
    """The rank that spends the least time in collectives, as it arrives last: its file and trace, and a note.

    A ValueError if the files aren't profiles of the ranks of one run.
    """
    paths: dict[int, Path] = {}
    worlds, spent, times = set(), {}, []
    for path in files:
        trace = read_trace(path)
        rank, world = _identity(trace, path)
        if rank in paths:
            raise ValueError(f"{paths[rank].name} and {path.name} are both of rank {rank}: one run is needed")
        paths[rank] = path
        worlds.add(world)
        times.append(_recorded(trace))
        spent[rank] = sum(e.us for e in trace.device if is_collective(e)) / len(trace.steps) / 1e3
        if min(spent, key=spent.__getitem__) == rank:
            last, of_last = rank, trace  # of no other: each takes much memory
    if len(worlds) > 1:
        sizes = " and ".join(map(str, sorted(worlds)))
        raise ValueError(f"the profiles are of runs with {sizes} ranks: one run is needed")
    if max(begin for begin, _ in times) > min(end for _, end in times):
        raise ValueError("the profiles were not recorded at the same time: one run is needed")
    middle = median(spent.values())
    if not middle or middle - spent[last] < APART * middle:
        each = f"; in collectives all spend about the same, {milliseconds(middle)} a step" if middle else ""
        text = f"{len(paths)} of {worlds.pop()} ranks{each}; this is rank {last}"
    else:
        text = (
            f"rank {last} is the last to arrive: {milliseconds(spent[last])} a step in collectives, where the median "
            f"of {len(paths)} ranks is {milliseconds(middle)}, most of it waiting; this is its account"
        )
    return paths[last], of_last, [Note("ranks", text)]


def _recorded(trace: Trace) -> tuple[float, float]:
    """When the profile was recorded, in µs of the clock."""
    base_us = trace.about.get("baseTimeNanoseconds", 0) / 1e3
    events = trace.host + trace.device
    return base_us + min(e.begin for e in events), base_us + max(e.end for e in events)


def _identity(trace: Trace, path: Path) -> tuple[int, int]:
    """(rank, number of ranks) as the profile says."""
    about = trace.about.get("distributedInfo", {})
    if not about.keys() >= {"rank", "world_size"}:
        raise ValueError(f"{path.name} doesn't say of which rank it is: pass one file rather than the folder")
    return about["rank"], about["world_size"]
