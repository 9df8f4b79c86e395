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

    The first rank's, where all arrive together. A ValueError if the files aren't profiles of the ranks of one run.
    """
    paths: dict[int, Path] = {}
    traces: dict[int, Trace] = {}  # of the ranks that may be returned: each takes much memory
    worlds, spent, times = set(), {}, []
    for path in files:
        trace = read_trace(path)
        rank, world = _identity(trace, path)
        if rank in paths:
            raise ValueError(
                f"{paths[rank].name} and {path.name} are both of rank {rank}: profiles of one run are needed"
            )
        paths[rank] = path
        worlds.add(world)
        times.append(_recorded(trace))
        spent[rank] = sum(e.us for e in trace.device if is_collective(e)) / len(trace.steps) / 1e3
        first, last = min(paths), min(spent, key=spent.__getitem__)
        traces = {r: t for r, t in (*traces.items(), (rank, trace)) if r in (first, last)}
    if len(worlds) > 1:
        raise ValueError(
            f"the profiles are of runs with {' and '.join(map(str, sorted(worlds)))} ranks: one run is needed"
        )
    if max(begin for begin, _ in times) > min(end for _, end in times):
        raise ValueError("the profiles were not recorded at the same time: one run is needed")
    middle = median(spent.values())
    if not middle or middle - spent[last] < APART * middle:
        each = f"; in collectives all spend about the same, {milliseconds(middle)} a step" if middle else ""
        text = f"{len(paths)} of {worlds.pop()} ranks{each}; this is rank {first}"
        return paths[first], traces[first], [Note("ranks", text)]
    text = (
        f"rank {last} is the last to arrive: {milliseconds(spent[last])} a step in collectives, where the median of "
        f"{len(paths)} ranks is {milliseconds(middle)}, most of it waiting; this is its account"
    )
    return paths[last], traces[last], [Note("ranks", text)]


def _recorded(trace: Trace) -> tuple[float, float]:
    """When the profile was recorded, in µs of the clock."""
    base = trace.about.get("baseTimeNanoseconds", 0)
    base_us = base / 1e3 if isinstance(base, int) else 0.0
    events = trace.host + trace.device
    return base_us + min(e.begin for e in events), base_us + max(e.end for e in events)


def _identity(trace: Trace, path: Path) -> tuple[int, int]:
    """(rank, number of ranks) as the profile says."""
    about = trace.about.get("distributedInfo")
    rank, world = (about.get(name) for name in ("rank", "world_size")) if isinstance(about, dict) else (None, None)
    if not isinstance(rank, int) or not isinstance(world, int):
        raise ValueError(f"{path.name} doesn't say of which rank it is: pass one file rather than the folder")
    return rank, world
