"""What makes a profile mislead: start-up inside it, lost events, stacks, one slow step; and notes on the loop."""

import statistics
from collections.abc import Iterator
from statistics import mean, median

from ..faults import remedy
from ..script import iterations, settings, stacks
from ..script.observation import Observation, Span
from ..script.stacks import place, quoted
from . import account
from .account import Spans, covered, intersect, length, of, subtract, union
from .loop import Loop
from .rules import products, unrecorded
from .scene import Scene, totals
from .source_places import source_lines
from .summary import LEAST as LEAST_GAIN
from .summary import Finding, milliseconds
from .trace import KERNEL, OP, PYTHON, RUNTIME, Note

NOT_EXPLAINED = "no finding explains"
BUSY = 0.2  # cores that others use
MOST_BREAKS = 3  # of a graph, that are named
TELLS_GROWTH = 0.5  # an exclusion of less than this says little
OFF = 0.15  # of a step: a clock that reads so much more or less is told of
LEAST = 0.02  # of the recorded time: less is left out
UNEXPLAINED = 0.1  # of the recorded time: less needs no explanation
_LATE = 1000.0  # µs: a last wait that takes longer is named


def warnings(scene: Scene) -> list[Note]:
    """Why the profile may mislead, one line each, with what to record again."""
    rules = {
        "start-up": _start_up,
        "lost events": _lost,
        "silent device": _silent,
        "outliers": _outliers,
        "unsteady steps": _unsteady,
        "slowed host": _stacks,
    }
    return [Note(kind, text) for kind, rule in rules.items() for text in rule(scene)]


def notes(scene: Scene) -> list[Note]:
    """What else the profile shows."""
    rules = {"last wait": _last_wait, "graphs": _graphs}
    return [Note(kind, text) for kind, rule in rules.items() for text in rule(scene)]


def _start_up(scene: Scene) -> Iterator[str]:
    calls = account.start_up_calls(scene.trace)
    spent = scene.account.idle_shares.get(account.START_UP, 0.0) if scene.account else length(of(calls)) / scene.us
    if spent < LEAST:
        return
    by_name = totals((call.name, call.us) for call in calls)
    names = ", ".join(f"{name} {milliseconds(us / 1e3)}" for name, us in by_name[:3])
    total = milliseconds(sum(us for _, us in by_name) / 1e3)
    allocations = sum(e.kind == RUNTIME and "alloc" in e.name.lower() for e in scene.trace.host)
    yield (
        f"start-up is inside the profile ({spent:.0%} of the time): {len(calls)} calls of over 1 ms take {total} "
        f"({names}; memory is reserved {allocations} times); record after some warm-up steps"
    )


def launches(scene: Scene) -> int:
    """Calls that launch work on a device."""
    return sum(e.kind == RUNTIME and "Launch" in e.name for e in scene.trace.host)


def _lost(scene: Scene) -> Iterator[str]:
    if not scene.trace.device and launches(scene):
        yield f"device events are missing: {launches(scene)} launches are recorded, and no kernel; record again"
    if scene.trace.lost:
        yield f"{scene.trace.lost} device events have no launch in the profile, and count for no op"


def _silent(scene: Scene) -> Iterator[str]:
    """Idle time while the host waits: no fix of the host's would fill it."""
    if scene.account is None:
        return
    waited, queued = (scene.account.idle_shares.get(reason, 0.0) for reason in (account.IN_WAIT, account.QUEUED))
    if waited >= LEAST:
        idle = scene.account.idle[account.IN_WAIT]
        calls = [e for e in scene.trace.host if account.is_wait(e) or account.is_copy_call(e)]
        places = (f"{call.name} of {source_lines(scene.trace, [call])}" for call in calls)
        silent = totals(zip(places, (covered(idle, call.begin, call.end) for call in calls), strict=True))
        place, us = silent[0]
        yield (
            f"the device shows no work for {waited:.0%} of the time while the host waits for it, most of it in "
            f"{place} ({milliseconds(scene.per_step(us) / 1e3)} a step): events are missing, or the stream waits for "
            "another rank; no finding counts it"
        )
    if queued >= 2 * LEAST:
        yield (
            f"the device idles for {queued:.0%} of the time before work that was launched already: it waits for "
            "another stream, another rank, or events are missing"
        )


def _outliers(scene: Scene) -> Iterator[str]:
    if scene.outliers:
        windows = account.step_windows(scene.trace)
        begin, end = max(scene.outliers, key=lambda span: span[1] - span[0])
        yield (
            f"{len(scene.outliers)} of {len(windows)} steps took over twice the median, the longest (step "
            f"{windows.index((begin, end))}) {milliseconds((end - begin) / 1e3)}: no finding counts them"
        )


def _unsteady(scene: Scene) -> Iterator[str]:
    lengths = [(end - begin) / 1e3 for begin, end in account.step_windows(scene.trace)]
    if len(lengths) > 2 and not 0.9 < mean(lengths) / median(lengths) < 1.1:
        yield f"steps differ: their mean is {milliseconds(mean(lengths))}, their median {milliseconds(median(lengths))}"


def _stacks(scene: Scene) -> Iterator[str]:
    if scene.account and any(e.kind == PYTHON for e in scene.trace.host):
        yield "stacks were recorded (with_stack), which slows the host: what the host costs is too high; record without"
    slowed = scene.trace.about.get("slowed_by")
    if isinstance(slowed, int | float) and slowed > 0.05:
        yield f"the profiler made the steps {slowed:.0%} longer"


def _last_wait(scene: Scene) -> Iterator[str]:
    last = max((e.begin for e in scene.trace.device), default=0.0)
    late = [e for e in scene.trace.host if account.is_wait(e) and e.end >= last and e.us > _LATE]
    if late and scene.account:
        longest = milliseconds(max(e.us for e in late) / 1e3)
        yield f"the last {late[-1].name}, {longest}, ends the recording and is not counted"


def _graphs(scene: Scene) -> Iterator[str]:
    kernels = [e for e in scene.trace.device if e.kind == KERNEL]
    replayed = [e for e in kernels if e.parent is not None and "GraphLaunch" in e.parent.name]
    if replayed:
        count = len({e.parent for e in replayed})
        yield f"{len(replayed)} of {len(kernels)} kernels come from {count} graph launch{'es' * (count > 1)}"


def unexplained(scene: Scene, findings: list[Finding]) -> Iterator[Note]:
    """The time that no finding explains, and what it is spent on."""
    parts = []
    for part, spans in scene.parts.items():
        rest = subtract(spans, union([span for f in findings if f.part == part for span in f.spans]))
        if scene.share(rest) >= UNEXPLAINED:
            spent = totals(_spent(scene, part, rest))[:3]
            inside = [f"{name} {us / scene.us:.0%}" for name, us in spent if us > 0]
            parts.append(f"{part} {scene.share(rest):.0%}" + (f" ({', '.join(inside)})" if inside else ""))
    if parts:
        yield Note(NOT_EXPLAINED, f"{NOT_EXPLAINED}: {'; '.join(parts)}")


def _spent(scene: Scene, part: str, spans: Spans) -> Iterator[tuple[str, float]]:
    """The kinds of kernels, the reasons of idleness or the ops that the spans are spent on, in µs."""
    if part == account.IDLE and scene.account:
        yield from ((reason, length(intersect(spans, idle))) for reason, idle in scene.account.idle.items())
    elif scene.account:
        for kind in dict.fromkeys(products.kind_of(e.name) for e in scene.trace.device if e.kind == KERNEL):
            kernels = of(products.kernels_that(scene.trace, kind))
            yield kind, length(intersect(kernels, spans))
            spans = subtract(spans, kernels)
    else:
        for op in scene.trace.ops:
            if op.track == scene.trace.thread:
                inner = sum(covered(spans, e.begin, e.end) for e in op.children if e.kind == OP)
                yield op.name, covered(spans, op.begin, op.end) - inner


def loop_warnings(loop: Loop) -> list[Note]:
    grown, _, _ = unrecorded.growth(loop.observation.memory, loop.observation.device_bytes, loop.observation.available)
    kept = next(unrecorded.growing_memory(loop), None)
    text = f"{grown} ({kept.where})" if kept else grown
    warnings = [Note("growing memory", text)] if grown and not (kept and kept.urgent) else []
    if (others := loop.observation.others or 0.0) >= BUSY:
        text = f"other processes took {others:.1f} cores: operators of several threads wait for each other then"
        warnings.append(Note("busy machine", f"{text}, and all shares may be wrong; profile again alone"))
    compiled = loop.observation.compiled
    if breaks := compiled.get("breaks"):
        at = "; ".join(f"{quoted(file, line)} ({why})" for file, line, why in breaks[:MOST_BREAKS])
        more = f"; and {len(breaks) - MOST_BREAKS} more" if len(breaks) > MOST_BREAKS else ""
        text = f"torch.compile returns to Python at {at}{more}: what is between is neither fused nor captured"
        warnings.append(Note("graph breaks", text))
    if where := loop.observation.settings.get(name := settings.DETERMINISTIC):
        warnings.append(Note(name, f"{name} are on, which are slower for some operators ({where}): {remedy(name)}"))
    if loop.observation.searched:
        text = "find_unused_parameters=True searches the graph after each forward pass: leave it out if all are used"
        warnings.append(Note("unused parameters", text))
    return warnings + [Note("environment", text) for text in loop.observation.variables]


def loop_notes(loop: Loop) -> list[Note]:
    if not loop.enough:
        return []
    clock = list(own_clock(loop.observation, loop.step_ms * (1 - loop.activities[stacks.EVALUATING])))
    if compiled := loop.observation.compiled:
        again = f", of them {len(compiled['again'])} again for other shapes or values" if compiled["again"] else ""
        text = f"torch.compile took {compiled['seconds']:.1f} s for {compiled['graphs']} graphs{again}"
        clock.append(Note("compilation", text))
    if (found := iterations.trend(loop.observation.pace.get("blocks", []))) and not any(
        unrecorded.slower_and_slower(loop)
    ):
        text = f"steps got no slower in {found.minutes:.3g} minutes: a growth above {found.most:.1%} is excluded"
        if found.most > TELLS_GROWTH:
            text = f"whether steps got slower isn't known: in {found.minutes:.3g} minutes their times varied too much"
        clock.append(Note("pace", text))
    if loop.observation.epochs or loop.observation.evaluations:
        return clock
    text = "no epoch ended while the loop was observed, so what follows one isn't in these shares"
    return [*clock, Note("epoch", f"{text}; --until-epoch waits for it")]


def loop_text(loop: Loop) -> list[str]:
    """What was seen, in lines, where there is no profile to go with it."""
    if not loop.iterations:
        return []
    median = milliseconds(statistics.median(loop.iterations) * 1e3)
    lines = [f"{loop.count} iterations were seen, median {median}"]
    lines += [f"  {line.share:4.0%}  {line.where}  {line.source}  ({line.activity})" for line in loop.lines()]
    findings = unrecorded.ranked(unrecorded.loop_findings(loop, LEAST_GAIN))
    return lines + [f"{each.finding}: {each.gain}; {each.where}; {each.advice}" for each in findings]


def own_clock(seen: Observation, step_ms: float) -> Iterator[Note]:
    """What the clock that runs longest reads beside the step's time, and why where they differ."""
    pairs = [(lines, [Span(*span) for span in spans]) for *lines, spans in seen.clock]
    pairs.sort(key=lambda pair: -max(span.seconds for span in pair[1]))
    whole = [pair for pair in pairs if any(span.iterations for span in pair[1])] or pairs
    for lines, spans in whole[:1]:
        spans = [span for span in spans if span.iterations] or spans
        reads = spans[-1].each_ms if spans[-1].with_first else statistics.median(span.each_ms for span in spans)
        between = " to ".join(dict.fromkeys(place(*line) for line in lines))
        text = f"the script's own clock ({between}) reads {milliseconds(reads)}"
        text += " an iteration" if spans[-1].iterations else " in one"
        yield Note("clock", f"{text}, a step takes {milliseconds(step_ms)}{_why(spans, reads, step_ms)}{_padded(seen)}")


def _why(spans: list[Span], reads: float, step_ms: float) -> str:
    if abs(reads / step_ms - 1) < OFF:
        return ""
    if spans[-1].pending and reads < step_ms:
        return ": it stops before the device is done, so synchronise before reading it"
    if not spans[-1].iterations:
        return ": it holds a part of an iteration"
    if reads < step_ms:
        return ": something of an iteration lies outside of it"
    inside = []
    if spans[-1].with_first:
        inside.append("the first iteration (compilation, warm-up, the loader's start)")
    if sum(span.evaluated for span in spans) > len(spans) / 2:
        inside.append("evaluation")
    return f": it contains {' and '.join(inside)}" if inside else ": it contains more than training steps"


def _padded(seen: Observation) -> str:
    positions, padded, _ = seen.padding or (1, 0, 0)
    if padded / positions < OFF:
        return ""
    return (
        f"; {padded / positions:.0%} of the positions are padding: a rate that counts them is "
        f"{positions / (positions - padded):.2g}× that of tokens"
    )
