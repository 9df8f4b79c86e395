"""What is slow in a training loop, read from a profile of it.

    with profile(schedule=schedule(wait=1, warmup=2, active=5, repeat=1), record_shapes=True, with_stack=True) as prof:
        for batch in loader:
            train_step(batch)
            prof.step()
    print(diagnose(prof))           # or diagnose("trace.json.gz"), or a folder with a file for each rank

Findings about sizes need `record_shapes`; source lines need `with_stack`, which slows the host: record costs without.
`diagnose(before, after)` compares two profiles.
"""

from dataclasses import replace
from pathlib import Path

import torch

from . import hygiene, ranks
from .account import (
    BEFORE_FIRST,
    COMMUNICATION,
    COMPUTE,
    COPIES,
    COPYING,
    HOST_REASONS,
    IDLE,
    IN_LOADER,
    IN_WAIT,
    LOADING,
    OPERATORS,
    PYTHON_CODE,
    START_UP,
    UPDATING,
    length,
    step_ms,
    union,
)
from .comparison import Comparison, compare
from .diagnosis import LEAST, SHOWN, Diagnosis, Finding
from .findings import (
    ATTENTION,
    CHAINS,
    CONSTANT,
    DETERMINISTIC,
    FP32,
    HOST_WAITS,
    KEPT_GRAPH,
    RETURNED,
    SEPARATE,
    UNALIGNED,
    UNBENCHMARKED,
    Scene,
    host_work,
    needless,
    on_cpu,
    products,
    traffic,
    waiting,
)
from .read_trace import read_trace
from .trace import Trace

TOLD = 0.1  # of the time in start-up: the verdict says so
MOSTLY = 0.75  # of the time in start-up: then nothing else can be judged
Source = Trace | torch.profiler.profile | str | Path
COSTS, PLACES = "costs.json.gz", "places.json.gz"  # of one run: without stacks, and with them
NEED_PLACES = (HOST_WAITS, DETERMINISTIC, KEPT_GRAPH)  # notes that begin so name lines
# What only shapes or stacks show.
FROM_SHAPES = {
    ATTENTION, CHAINS, CONSTANT, DETERMINISTIC, FP32, RETURNED, SEPARATE, UNALIGNED, UNBENCHMARKED,
}  # fmt: skip

# These report events that the trace holds, so an incomplete trace is enough.
FROM_PRESENCE = (
    waiting.host_waits,
    traffic.pageable_copies,
    traffic.exposed_copies,
    traffic.collectives,
    host_work.zeroed_gradients,
    host_work.returned_memory,
    products.unaligned_sizes,
    products.fp32_products,
    products.unfused_chains,
    products.layout_conversions,
    products.handmade_attention,
    products.deterministic_convolutions,
    products.unbenchmarked_convolutions,
    on_cpu.fp32_products,
    on_cpu.unfused_chains,
)
# These conclude from the absence of events, so they need a complete trace.
FROM_ABSENCE = (
    waiting.loader_waits,
    host_work.unfused_optimizer,
    needless.unused_results,
    needless.constant_work,
    needless.separate_projections,
)


def diagnose(
    profile: Source, after: Source | None = None, *, places: Source | None = None, least: float = LEAST
) -> Diagnosis | Comparison:
    """Where a step's time goes, what bounds it, and what to change first, from a live profile or a saved trace.

    A folder holds a profile for each rank; the one that the others wait for is diagnosed. `places` is a second profile
    of the loop with stacks and shapes: it tells source lines and sizes, `profile` the costs. With `after`, a profile
    after a change, the two are compared. Findings that could bring less than the share `least` are left out.
    """
    if after is not None:
        return compare(diagnose(profile, least=least), diagnose(after, least=least))
    if isinstance(profile, str | Path) and Path(profile).is_dir():
        return _diagnose_folder(Path(profile), least)
    found, findings = _diagnosed(read_trace(profile), least)
    if places is not None:
        told, located = _diagnosed(read_trace(places), 0.0)  # stacks slow the host: there a share may be below `least`
        findings = _located(findings, located, found, told, least)
        # On a CPU most findings need shapes, so only the second profile knows what no finding explains.
        needed = NEED_PLACES if found.account else (*NEED_PLACES, hygiene.NOT_EXPLAINED)
        notes = [note for note in found.notes if not note.startswith((*needed, "no Python frames", "no shapes"))]
        notes += [note for note in told.notes if note.startswith(needed)]
        found = replace(found, notes=tuple(notes))
    source = Path(profile) if isinstance(profile, str | Path) else None
    return _with_findings(replace(found, source=source), findings)


def _diagnosed(trace: Trace, least: float) -> tuple[Diagnosis, list[Finding]]:
    """The diagnosis without its findings, and all of them."""
    scene = Scene(trace)
    account = scene.account
    shares = {part: length(spans) / scene.us for part, spans in scene.parts.items()}
    findings = _findings(scene, least)
    notes = hygiene.notes(scene)
    if trace.complete:
        notes += needless.kept_graph(trace)
    notes += [*waiting.on_a_gpu(scene), *hygiene.unexplained(scene, findings), *trace.notes]
    if not trace.complete:
        notes.append("of a trace with gaps only what is there is reported, not what seems missing")
    bound = _bound(scene)
    found = Diagnosis(
        verdict=_verdict(scene, bound, shares),
        bound=bound,
        steps=len(trace.steps),
        step_ms=step_ms(trace),
        account=shares if account else None,
        idle=account.idle_shares if account else {},
        host=None if account else shares,
        findings=(),
        notes=tuple(notes),
        warnings=tuple(hygiene.warnings(scene)),
    )
    return found, findings


def _with_findings(found: Diagnosis, findings: list[Finding]) -> Diagnosis:
    """The diagnosis with its findings."""
    verdict = found.verdict
    if findings:
        first = findings[0]
        verdict += f" Change first: {first.finding}, up to {first.gain_share:.0%} of the time."
    return replace(found, verdict=verdict, findings=tuple(findings[:SHOWN]), further=tuple(findings[SHOWN:]))


def _located(
    findings: list[Finding], located: list[Finding], found: Diagnosis, told: Diagnosis, least: float
) -> list[Finding]:
    """The findings with the places of another profile, and that profile's own, which need stacks or shapes.

    Stacks slow the host, so of the latter the share of their part of the account counts.
    """
    by_name = {finding.finding: finding for finding in located}
    placed = [replace(f, where=by_name[f.finding].where) if f.finding in by_name else f for f in findings]
    names = {finding.finding for finding in findings}
    for other in (f for f in located if f.finding not in names and f.finding in FROM_SHAPES):
        of_part = other.gain_share / max(told.parts.get(other.part, 0.0), 1e-9)
        share = of_part * found.parts.get(other.part, 0.0)
        if share >= least:
            placed.append(replace(other, gain_share=share, gain_ms=share * found.step_ms, spans=[]))
    first = {finding.part for finding in findings[:1]}
    return sorted(placed, key=lambda f: (found.bound in ("host", "input") and f.part not in first, -f.gain_share))


def _diagnose_folder(folder: Path, least: float) -> Diagnosis:
    """The rank that the others wait for, or the one profile of a run without ranks; the source lines of any."""
    places = folder / PLACES if (folder / PLACES).is_file() else None
    if (folder / COSTS).is_file():
        return diagnose(folder / COSTS, places=places, least=least)
    files = sorted(p for p in folder.iterdir() if p.name.endswith((".json", ".json.gz")) and p != places)
    if not files:
        raise ValueError(f"{folder} holds no profile (*.json or *.json.gz)")
    if len(files) == 1:
        return diagnose(files[0], places=places, least=least)
    last, notes = ranks.last_to_arrive(files)
    found = diagnose(last, places=places, least=least)
    return replace(found, warnings=(*notes, *found.warnings))


def _findings(scene: Scene, least: float) -> list[Finding]:
    """What could bring the share `least` or more, first what holds the step up, then by gain."""
    rules = FROM_PRESENCE + FROM_ABSENCE if scene.trace.complete else FROM_PRESENCE
    findings = [on_cpu.limited(scene, finding) for rule in rules for finding in rule(scene)]
    if scene.trace.complete:
        explained = union([span for f in findings if f.part == IDLE for span in f.spans])
        findings += host_work.slow_launches(scene, explained)
    findings = [finding for finding in findings if finding.gain_share >= least]
    return sorted(findings, key=lambda f: (scene.held_up and f.part != IDLE, -f.gain_share))


def _bound(scene: Scene) -> str:
    """The word for what bounds the step: what takes most, or the host where it never waits for the device."""
    if scene.account is None and hygiene.launches(scene):
        return "unknown"
    if scene.account is None:
        shares = {part: length(spans) for part, spans in scene.parts.items()}
        words = {
            "compute": shares[OPERATORS] + shares[UPDATING],
            "host": shares[PYTHON_CODE],
            "input": shares[LOADING],
            "copies": shares[COPYING],
        }
        return max(words, key=words.__getitem__)
    shares, idle = scene.account.shares, scene.account.idle_shares
    host = {"host": sum(idle.get(reason, 0.0) for reason in HOST_REASONS), "input": idle.get(IN_LOADER, 0.0)}
    if scene.held_up and idle.get(START_UP, 0.0) < MOSTLY:
        return max(host, key=host.__getitem__)
    words = host | {
        "compute": shares[COMPUTE],
        "communication": shares[COMMUNICATION],
        "copies": shares[COPIES],
        "start-up": idle.get(START_UP, 0.0) + idle.get(BEFORE_FIRST, 0.0),
        "unknown": idle.get(IN_WAIT, 0.0),
    }
    return max(words, key=words.__getitem__)


_SAID = {
    "compute": "the device is the limit",
    "host": "the host launches work more slowly than the device does it",
    "input": "the loader delivers batches more slowly than the device takes them",
    "communication": "communication is the limit",
    "copies": "copies are the limit",
    "start-up": "most of it is start-up, which a training pays once: record after some steps",
    "unknown": "the device shows no work while the host waits for it",
}
_SAID_ON_CPU = {
    "compute": "operators are the limit",
    "host": "Python is the limit",
    "input": "the loader is the limit",
    "copies": "copies of data are the limit",
    "unknown": "the device's events are missing, only launches are recorded",
}


def _verdict(scene: Scene, bound: str, shares: dict[str, float]) -> str:
    told = ", ".join(
        f"{part} {share:.0%}" for part, share in sorted(shares.items(), key=lambda p: -p[1]) if share >= 0.01
    )
    said = (_SAID if scene.account else _SAID_ON_CPU)[bound]
    verdict = f"{bound}: {said} ({told})."
    start_up = scene.account.idle_shares.get(START_UP, 0.0) if scene.account else 0.0
    if bound != "start-up" and start_up >= TOLD:
        verdict += f" Start-up takes {start_up:.0%} of the time."
    if scene.held_up:
        verdict += " The host doesn't run ahead: it is the device that waits, so faster kernels bring little yet."
    return verdict
