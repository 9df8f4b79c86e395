"""What no profile shows, as it happens between recorded iterations or in lines: rules from a `Loop` to its findings."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pandas as pd

from ...script import iterations, settings, stacks
from ...script.stacks import place, quoted
from ..loop import Loop, by_line, growth
from ..summary import ESTIMATE, MEASURED, SPECIFIC, Finding, milliseconds
from . import wall

# Seen by the host's clock, on which a wait for the device counts, too
OF_HOST = {"Python loop", "garbage collection"}
MICRO_BATCHES = 8  # of a step, from which on fewer and larger ones are advised
LEAST_FORMED = 0.05
LOOP_CALLS = 200  # of a user's function in an iteration, from which on its lines are a loop's
LOOP_SHARE, SMALL_MS = 0.1, 5.0  # of the time in a loop and its backward pass, half of it in the loop; of a pass
LEAST_BACKWARD = 0.01
DEAR, MULTIPLIES = 0.2, 0.2  # shares: of a line in the time, and of products in a line that is a model's
ALONE = 0.8  # of what a kind of iterations takes beyond ordinary ones, in one activity
SPREAD = 0.1  # of a function's time in a line that is named as one of several
PAGE, FAULT_S = 4096, 1e-6  # bytes of a page, and what the kernel takes to clear and map one
SPREAD_COUNTS = 0.5
ENDS_S, URGENT = 3600.0, 0.6  # memory that is full so soon ends the training, which weighs as so much of the time
COSTLY, OF_MODELS = "costly line", ("<module>", "forward")  # whose lines are many things' and count one by one
LEAST_SLOWER = 0.03  # growth of an iteration's time over all that was watched
MOST_GROWN, THROTTLED = 3, 0.95  # kinds of things that are named; a GPU's clock beside the one at first
# Findings whose cause is another one's, where that brings half as much
EXPLAINED = {
    "small operators": {"Python loop", "small batches", *SPECIFIC},
    "waiting for the loader": {"new loader each batch", "workers on the step's cores"},
    "recomputed activations": {"weights formed anew"},
    "unfused optimizer": {"dense embedding gradients"},
    "small batches": {"gradients averaged too often"},
}
_ACTIVITIES = {
    stacks.EVALUATING: "evaluation",
    stacks.SAVING: "checkpoints",
    stacks.DRAWING: "drawing",
    stacks.LOGGING: "logging",
    stacks.RECOMPUTING: "recomputed activations",
    stacks.COMPILING: "compiling",
}


def activities(loop: Loop) -> Iterator[Finding]:
    repeated = loop.forms[loop.forms["activity"] == stacks.RECOMPUTING]["share"].sum()
    for activity, fault in _ACTIVITIES.items():
        if share := loop.activities[activity] - (repeated if activity == stacks.RECOMPUTING else 0.0):
            evidence = f"{share:.0%} of the time of {loop.count} iterations"
            if activity == stacks.COMPILING and (again := loop.observation.compiled.get("again")):
                evidence += f"; compiled again because {again[-1]}"
            kinds = loop.beyond(activity)
            evidence += loop.mostly(kinds, share)
            sure = ESTIMATE if activity == stacks.EVALUATING and loop.observation.evaluations < 2 else MEASURED
            yield loop.finding(fault, share, _passed(loop, activity), evidence, sure, kinds=kinds)


def _passed(loop: Loop, activity: str) -> str:
    """The cause of a kind of iterations that an activity is nearly all of, and mostly in; else its dearest line."""
    for kind in loop.kinds:
        spent = kind.spent.get(activity, 0.0)
        if kind.where and spent >= max(ALONE * kind.share, loop.activities[activity] / 2):
            return quoted(*kind.where[:2])
    return loop.dearest(activity)


def python_loops(loop: Loop) -> Iterator[Finding]:
    """Loops of the user's over single elements, and functions that make many small calls: one call could do all.

    The loop's own line is named, whatever it calls. A pass that takes long is no small one, unless it calls a module of
    torch's, which could take all elements at once.
    """
    inside: set[tuple[str, str]] = set()
    for found in loop.observation.loops:
        share = found["seconds"] / loop.total
        inside |= {(file, name) for file, name in found["functions"]}
        if 2 * share < LOOP_SHARE or not (found["module"] or share * loop.step_ms / found["passes"] < SMALL_MS):
            continue
        at = place(found["file"], found["line"])
        evidence = f"{at} runs {found['passes']:,} times an iteration, {share:.0%} of the time in {found['function']}"
        if found["module"]:
            evidence = (
                f"{found['module']} is called {found['passes']:,} times an iteration from {at}, {share:.0%} of the time"
            )
        functions = [(file, name) for file, name in found["functions"]]
        whole = _loop_of(loop, share, functions, quoted(found["file"], found["line"]), evidence)
        yield from [whole] if whole.gain_share >= LOOP_SHARE else []
    looping = loop.table[(loop.table["activity"] == stacks.COMPUTING) & (loop.table["calls"] >= LOOP_CALLS)]
    for (file, name), lines in looping.groupby(["file", "function"]):
        share = lines["share"].sum()
        if share >= LOOP_SHARE and (file, name) not in inside:
            evidence = f"{lines['calls'].max():,} calls an iteration from {name}, {share:.0%} of the time"
            yield _loop_of(loop, share, [(file, name)], quoted(*by_line(lines).index[0]), evidence)


def _loop_of(loop: Loop, share: float, functions: list[tuple[str, str]], where: str, evidence: str) -> Finding:
    """With the backward pass of what the functions compute."""
    if (back := sum(loop.backward_share(*function) for function in functions)) >= LEAST_BACKWARD:
        evidence += f", and {back:.0%} for their backward pass"
        share += back
    return loop.finding("Python loop", share, where, evidence, ESTIMATE)


def formed_weights(loop: Loop) -> Iterator[Finding]:
    """Weights that are formed before each product with them; what checkpoints repeat of that is no activation's."""
    if (share := loop.forms["share"].sum()) >= LEAST_FORMED:
        where = by_line(loop.forms).index[0]
        often = max(map(loop.formed, loop.forms.itertuples()))
        evidence = f"{often:,.3g} weights a step are formed anew before their product, {share:.0%} of the time"
        again = loop.forms[loop.forms["activity"] == stacks.RECOMPUTING]["share"].sum()
        if again >= LEAST_FORMED:
            evidence += f", {again / share:.0%} of that where checkpoints repeat the forward pass"
        yield loop.finding("weights formed anew", share, quoted(*where), evidence, ESTIMATE)


def garbage_collection(loop: Loop) -> Iterator[Finding]:
    """Named by the list whose items it goes through again and again, or the line at which most of it begins."""
    seen = loop.observation
    kinds = {kind.name: kind.collected for kind in loop.kinds[1:] if kind.collected}
    share = max(seen.garbage_s / loop.total, sum(kinds.values()))
    evidence = f"{share:.0%} of the time in Python's collector of cycles{loop.mostly(kinds, share)}"
    where, case = "wherever objects are made", ""
    for file, line, seconds in seen.collected:
        if line and seconds >= seen.garbage_s / 2:
            where = quoted(file, line)
            case = "asked for" if "gc.collect" in where else ""
    for file, line, *_, collected in seen.growing:
        if collected:
            where, case = quoted(file, line), "kept"
    yield loop.finding("garbage collection", share, where, evidence, case=case, kinds=kinds)


def repeated_backwards(loop: Loop) -> Iterator[Finding]:
    """Several backward passes in an iteration: through one graph, or of micro-batches."""
    each, backward = loop.observation.backwards / loop.count, loop.activities[stacks.BACKWARD]
    if backward and each >= 1.5 and loop.observation.retained >= 0.5 * loop.count:
        evidence = f"{each:.3g} backward passes an iteration, and the graph is kept for the next"
        fault, repeated = "repeated backward", backward
    elif backward and each >= MICRO_BATCHES:
        evidence = f"{each:.3g} micro-batches an iteration"
        fault, repeated = "small batches", backward + loop.activities[stacks.COMPUTING]
    else:
        return
    yield loop.finding(fault, repeated * (1 - 1 / each), loop.dearest(stacks.BACKWARD), evidence, ESTIMATE)


def unclaimed_gradients(loop: Loop) -> Iterator[Finding]:
    """Backward passes through what nothing trains."""
    if not loop.observation.unclaimed:
        return
    name, count, numbers, passed = loop.observation.unclaimed
    evidence = f"{count} weights get gradients, {numbers:.0%} of all numbers that do, and no optimizer has them"
    share = numbers * loop.activities[stacks.BACKWARD] * (0.5 if passed else 1)  # what passes on remains
    yield loop.finding("gradients without an optimizer", share, f"weights of {name}", evidence, ESTIMATE)


def growing_memory(loop: Loop) -> Iterator[Finding]:
    """Memory that a list of the script's keeps, which costs new pages, and ends the training when it is full.

    Within a loader's first pass nobody can know whether the list lives longer than that.
    """
    lasts = loop.observation.epochs > 0 or not (loop.activities[stacks.LOADING] + loop.activities[stacks.DATASET])
    grown, slope, left = growth(loop.observation.memory, loop.observation.device_bytes, loop.observation.available)
    for file, line, count, graphs, size, _ in loop.observation.growing if grown else []:
        if not graphs and size < slope / 10:
            continue  # numbers, which can't be what fills it
        share = slope / PAGE * FAULT_S * 1e3 / loop.step_ms
        evidence = f"{grown}; a list of {count:,} items gets more here in each iteration"
        finding = loop.finding("growing memory", share, quoted(file, line), evidence, ESTIMATE, "graphs" * graphs)
        yield replace(finding, urgent=lasts and left * loop.step_ms / 1e3 < ENDS_S)


def anomaly_detection(loop: Loop) -> Iterator[Finding]:
    """It notes a traceback for each operation, and looks for NaN in each gradient."""
    if loop.observation.anomaly:
        share = loop.activities[stacks.NOTING] + loop.activities[stacks.BACKWARD]
        evidence = f"{loop.activities[stacks.NOTING]:.0%} of the time notes tracebacks; each gradient is checked"
        where = loop.observation.settings.get(settings.ANOMALY, "")
        yield loop.finding("anomaly detection", share, where, evidence, ESTIMATE)


def slower_and_slower(loop: Loop) -> Iterator[Finding]:
    """Iterations that take longer and longer, with the line that does and what there is more and more of."""
    watched = loop.observation.pace
    found, looks = iterations.trend(watched.get("blocks", [])), watched.get("looks", [])
    if not found or found.low * found.minutes < LEAST_SLOWER:
        return
    times = f"{milliseconds(found.first_ms)} at first and {milliseconds(found.last_ms)} {found.minutes:.3g} minutes"
    evidence = f"a step took {times} later; {found.growth:.0%} ({found.low:.0%} to {found.high:.0%}) more a minute"
    more = iterations.grown(looks)
    if more:
        evidence += f"; an iteration adds {', '.join(f'{each:.2g} {name}' for name, each in more[:MOST_GROWN])}"
    clocks = [look["counted"][iterations.CLOCK] for look in looks if iterations.CLOCK in look["counted"]]
    if falls := bool(clocks) and clocks[-1] < THROTTLED * clocks[0]:
        hot = looks[-1]["counted"].get(iterations.CELSIUS, 0)
        evidence += f"; the GPU's clock fell from {clocks[0]:,.0f} to {clocks[-1]:,.0f} MHz at {hot:.0f} °C"
    line = iterations.later_line(looks)
    its_own = line is not None and line[1] * 1e3 > (found.last_ms - found.first_ms) / 4  # half, between the halves
    case = "" if more else "hot" if falls else "line" if its_own else "else"
    where = quoted(*line[0]) if line else "all lines alike"
    share = 1 - found.first_ms / found.last_ms
    yield loop.finding("slower and slower", share, where, evidence, case=case)


def repeated_averaging(loop: Loop) -> Iterator[Finding]:
    """Gradients that the ranks average more than once before a step."""
    each = loop.observation.averaged / loop.count
    if each >= 1.5 and loop.activities[stacks.BACKWARD]:
        evidence = f"{each:.3g} times an iteration DistributedDataParallel averages all gradients over the ranks"
        share = (1 - 1 / each) * loop.activities[stacks.BACKWARD]
        yield loop.finding("gradients averaged too often", share, loop.dearest(stacks.BACKWARD), evidence, ESTIMATE)


RULES: tuple[Callable[[Loop], Iterator[Finding]], ...] = (
    activities,
    python_loops,
    formed_weights,
    garbage_collection,
    repeated_backwards,
    unclaimed_gradients,
    growing_memory,
    anomaly_detection,
    slower_and_slower,
    repeated_averaging,
    *wall.RULES,
)


def loop_findings(loop: Loop, least: float) -> list[Finding]:
    """What all rules find that could bring so much of the time, or ends the training."""
    if not loop.enough:
        return []
    return [found for rule in RULES for found in rule(loop) if found.gain_share >= least or found.urgent]


def costly_line(loop: Loop, products: Mapping[str, float], findings: list[Finding]) -> Iterator[Finding]:
    """The line that computes longest of those that hardly multiply matrices, by the products in each.

    What is no model's `forward` counts with all of its lines, unless it is mostly gone back through: that is part
    of a model. None where a finding explains half of the time: one that names the line, small operators, of which
    `products` knows the lines, or garbage collections, if most of them begin there.
    """
    lines = loop.table[loop.table["activity"] == stacks.COMPUTING] if loop.enough else loop.table[:0]
    share_of = [products.get(place(row.file, row.line), 0.0) for row in lines.itertuples()]
    lines = lines.loc[[share < MULTIPLIES for share in share_of]]
    whole = lines["function"].where(~lines["function"].isin(OF_MODELS), lines["line"])
    loops = [
        found
        for found in loop.observation.loops
        if any(f.where.startswith(f"{place(found['file'], found['line'])} ") for f in findings)
    ]
    inside = {(file, name) for found in loops for file, name in found["functions"]}
    groups = [group for _, group in lines.groupby(["file", whole]) if not _of_model(loop, group)]
    groups = [group for group in groups if (group["file"].iloc[0], group["function"].iloc[0]) not in inside]
    for group in sorted(groups, key=lambda group: -group["share"].sum())[:1]:
        dearest, share = by_line(group).index[0], group["share"].sum()
        called = any(place(row.file, row.line) in products for row in group.itertuples())
        collects = any(dearest == (file, line) for file, line, _ in loop.observation.collected)
        explained = (
            f.gain_share
            for f in findings
            if f"{place(*dearest)} " in f"{f.where} "
            or (called and f.finding == "small operators")
            or (collects and f.finding == "garbage collection")
        )
        if share >= DEAR and max(explained, default=0.0) < share / 2:
            evidence = f"{share:.0%} of the time in {group['function'].iloc[0]}, hardly any of it in matrix products"
            file, line, last = _lines_of(group)
            evidence += f"; lines {line} to {last}" if last > line else ""
            yield loop.finding(COSTLY, share, quoted(file, line), evidence, ESTIMATE)


def _lines_of(group: pd.DataFrame) -> tuple[str, int, int]:
    """The line that has half of a function's time, twice; else from where to where it is spread: looks come late."""
    by_share = by_line(group)
    (file, line), whole = by_share.index[0], by_share.sum()
    if by_share.iloc[0] >= whole / 2:
        return file, line, line
    spread = [number for (_, number), share in by_share.items() if share >= SPREAD * whole]
    return file, min(spread), max(spread)


def _of_model(loop: Loop, lines: pd.DataFrame) -> bool:
    """Whether a function's lines are mostly gone back through."""
    file, function = lines["file"].iloc[0], lines["function"].iloc[0]
    return function not in OF_MODELS and loop.backward_share(file, function) >= lines["share"].sum() / 2


def ranked(findings: list[Finding], ordinary: float = 1.0) -> list[Finding]:
    """In order of gain; what ends the training counts for so much at least. Without what another one explains.

    What is spread over many lines counts for less: a single change that brings more than half as much is done first.

    Where `ordinary` steps hold less than half of the wall time, what is of the other iterations comes first.
    """
    gains = {finding.finding: finding.gain_share for finding in findings}
    causes = {f.finding: [gains.get(cause, 0.0) for cause in EXPLAINED.get(f.finding, ())] for f in findings}
    left = [f for f in findings if max(causes[f.finding], default=0.0) < f.gain_share / 2 or not f.gain_share]

    def order(finding: Finding) -> tuple[bool, float]:
        of_ordinary = 2 * sum(finding.kinds.values()) < finding.gain_share
        gain = finding.gain_share * (SPREAD_COUNTS if finding.spread else 1.0)
        return ordinary < 0.5 and of_ordinary, -max(gain, URGENT * finding.urgent)

    return sorted(left, key=order)
