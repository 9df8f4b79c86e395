"""What is slow in a training loop, read from a profile of it.

    with profile(schedule=schedule(wait=1, warmup=2, active=5, repeat=1), record_shapes=True, with_stack=True) as prof:
        for batch in loader:
            train_step(batch)
            prof.step()
    print(diagnose(prof))           # or diagnose("trace.json.gz"), or a folder with a file for each rank

Findings about sizes need `record_shapes`; source lines need `with_stack`, which slows the host: record costs without.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..script.iterations import EPOCHS, KINDS, PHASE, SLOW
from ..script.observation import COSTS, PLACES, SLOWEST, Observation, read_observation
from ..script.stacks import place
from . import account, caveats
from .account import union
from .loop import Loop
from .rules import convolutions, formed_weights, host_work, needless, on_cpu, products, unrecorded, waiting, wall
from .scene import Scene
from .source_places import backward_shares, near
from .summary import LEAST, SPECIFIC, Diagnosis, Finding, Wall, change_first
from .trace import NO_SHAPES, NO_STACKS, Note, Trace
from .trace_file import read_trace

START_UP_MATTERS = 0.1  # of the time: the verdict names it
UNSEEN = 0.1  # of the wall time: the verdict names it
MOSTLY = 0.75  # of the time in start-up: then nothing else can be judged
Source = Trace | torch.profiler.profile | str | Path
OBSERVED = re.compile(r"observed(\d*)\.json")  # what was seen of the unprofiled loop, by rank
# Kinds of notes for which the profile with stacks is read
NAME_LINES = {"host synchronisation", "deterministic cuDNN", "graph kept in evaluation", products.RATE}


RULES: Sequence[Callable[[Scene], Iterable[Finding]]] = [
    *waiting.RULES, *host_work.RULES, *convolutions.RULES, *needless.RULES,
]  # fmt: skip
DETAILED_RULES: Sequence[Callable[[Scene], Iterable[Finding]]] = [  # only shapes or stacks show what they find
    *host_work.DETAILED_RULES, *products.DETAILED_RULES, *convolutions.DETAILED_RULES, *on_cpu.DETAILED_RULES,
    *needless.DETAILED_RULES,
]  # fmt: skip


def diagnose(profile: Source, *, places: Source | None = None, least: float = LEAST) -> Diagnosis:
    """Where a step's time goes, what bounds it, and what to change first, from a live profile or a saved trace.

    A folder holds a profile for each rank; the one that the others wait for is diagnosed. `places` is a second profile
    of the loop with stacks and shapes: it tells source lines and sizes, `profile` the costs. Findings that could bring
    less than the share `least` are left out.
    """
    return read_and_diagnose(profile, places=places, least=least)[0]


def read_and_diagnose(
    profile: Source, *, places: Source | None = None, least: float = LEAST
) -> tuple[Diagnosis, Trace]:
    """The diagnosis of one profile or folder, and the trace that it is of."""
    source = Path(profile) if isinstance(profile, str | Path) else None
    about_ranks: list[Note] = []
    observed: dict[int, Observation] = {}
    late: list[Finding] = []
    slowest: Path | None = None
    if source and source.is_dir():
        observed, slowest = _observed(source), source / SLOWEST
        last, late = wall.late_rank(observed)
        source, profile, about_ranks, places = _in_folder(source, last)
    trace = read_trace(profile)
    diagnosis, findings = _diagnosed(trace, least)
    gone_back: dict[tuple[str, str], float] = {}
    by_line: dict[str, float] = {}
    forming: dict[str, float] = {}
    if places is not None:
        stacks = read_trace(places)
        if observed:
            gone_back, by_line = backward_shares(stacks), needless.products_by_line(stacks)
            forming = formed_weights.forming_lines(stacks)
        detailed, located = _diagnosed(stacks, 0.0)  # stacks slow the host: a share may be below `least`
        findings = _located(findings, located, diagnosis, detailed, least)
        # On a CPU most findings need shapes, so only the second profile knows what no finding explains.
        taken = NAME_LINES if diagnosis.account else NAME_LINES | {caveats.NOT_EXPLAINED}
        notes = [note for note in diagnosis.notes if note.kind not in taken | {NO_STACKS, NO_SHAPES}]
        notes += [note for note in detailed.notes if note.kind in taken]
        diagnosis = replace(diagnosis, notes=tuple(notes))
    if observed:
        rank = re.fullmatch(r"rank(\d+)\.json\.gz", source.name) if source else None
        loop = Loop(observed.get(int(rank[1]) if rank else 0) or next(iter(observed.values())), gone_back, forming)
        diagnosis, findings = _with_observed(diagnosis, findings, loop, least)
        if slowest and slowest.is_file():
            findings += _of_slowest(slowest, loop, least)
        if places is not None and not diagnosis.account:
            findings += unrecorded.costly_line(loop, by_line, findings)
        told = {(unrecorded.COSTLY, finding.where) for finding in late}  # the same line, as only one rank's
        findings = [finding for finding in findings if (finding.finding, finding.where) not in told]
        findings = unrecorded.ranked([*findings, *late], loop.ordinary)
        diagnosis = _with_wall(diagnosis, loop, findings)
    findings = _with_remedies(findings)
    findings.sort(key=lambda finding: finding.option)
    return replace(
        diagnosis,
        verdict=diagnosis.verdict + change_first(findings),
        findings=tuple(findings),
        warnings=(*about_ranks, *diagnosis.warnings),
        source=source,
    ), trace


def _with_remedies(findings: list[Finding]) -> list[Finding]:
    """A loop in Python, and what the host launches slowly, with the remedy of what it is mostly made of."""
    kept = list(findings)
    for broad in [f for f in findings if f.finding in ("Python loop", "host slower than the device")]:
        for one in (f for f in findings if f.finding in SPECIFIC and 2 * f.gain_share >= broad.gain_share):
            of_host = broad.part == account.IDLE
            if (of_host or near(broad.where, one.where)) and one in kept:
                where = one.where if of_host else broad.where
                evidence = f"{broad.evidence}; {one.evidence}"
                kept[kept.index(broad)] = replace(broad, where=where, evidence=evidence, advice=one.advice)
                kept.remove(one)
                break
    return kept


def _observed(folder: Path) -> dict[int, Observation]:
    """What was observed of each rank beside the profiles in a folder."""
    files = {int(each[1] or 0): file for file in folder.iterdir() if (each := OBSERVED.fullmatch(file.name))}
    return {rank: read_observation(file) for rank, file in sorted(files.items())}


def _with_observed(
    diagnosis: Diagnosis, findings: list[Finding], loop: Loop, least: float
) -> tuple[Diagnosis, list[Finding]]:
    """What the profile shows and what the unprofiled loop showed, as shares of the latter's time."""
    if not loop.enough:
        return diagnosis, findings
    idle = diagnosis.account[account.IDLE] if diagnosis.account else 1.0
    new = [_at_most(f, idle if f.finding in unrecorded.OF_HOST else 1.0) for f in unrecorded.loop_findings(loop, least)]
    new = [finding for finding in new if finding.gain_share >= least or finding.urgent]
    names = {finding.finding for finding in new}
    inside = min(loop.ordinary, 1 - loop.outside)
    shares = [(f, f.gain_share * inside) for f in findings if f.finding not in names]
    scaled = [replace(f, gain_share=share, gain_ms=share * loop.step_ms) for f, share in shares]
    scaled = [_at_most(f, loop.updating if f.part == account.UPDATING else 1.0) for f in scaled]
    warnings = (*caveats.loop_warnings(loop), *diagnosis.warnings)
    notes = (*caveats.loop_notes(loop), *diagnosis.notes)
    diagnosis = replace(diagnosis, lines=tuple(loop.lines()), warnings=warnings, notes=notes, files=loop.files())
    return diagnosis, new + [finding for finding in scaled if finding.gain_share >= least]


def _of_slowest(file: Path, loop: Loop, least: float) -> list[Finding]:
    """What a recorded slow iteration shows, as a share of what such iterations take."""
    kind = next((kind for kind in loop.kinds[1:] if kind.name in (SLOW, EPOCHS, PHASE, *KINDS.values())), None)
    if kind is None:
        return []
    _, findings = _diagnosed(read_trace(file), least)
    shares = [(f, f.gain_share * kind.share) for f in findings]
    return [
        replace(f, gain_share=share, gain_ms=share * loop.step_ms, spans=[], kinds={kind.name: share},
                evidence=f"in {kind.name}: {f.evidence}")
        for f, share in shares if share >= least and not f.option
    ]  # fmt: skip


def _with_wall(diagnosis: Diagnosis, loop: Loop, findings: list[Finding]) -> Diagnosis:
    """With the account of the wall time: what each kind of iterations takes, and which findings explain that."""
    if not (loop.enough and loop.kinds):
        return diagnosis
    left = {kind.name: kind.share for kind in loop.kinds}
    rows: dict[str, list[tuple[str, float]]] = {kind.name: [] for kind in loop.kinds}
    for finding in findings:
        wanted = {name: share for name, share in finding.kinds.items() if name in left}
        wanted[loop.kinds[0].name] = finding.gain_share - sum(wanted.values())
        for name, share in wanted.items():
            if (taken := min(share, left[name])) >= LEAST / 2:
                left[name] -= taken
                rows[name].append((finding.finding, taken))
    left |= {PHASE: 0.0}  # it explains itself
    account = [replace(kind, findings=tuple(rows[kind.name]), unexplained=left[kind.name]) for kind in loop.kinds]
    unseen = [wall.unseen(loop, kind, left[kind.name]) for kind in loop.kinds[1:] if left[kind.name] >= UNSEEN]
    largest = [kind for kind in loop.kinds[1:] if kind.share >= UNSEEN]
    names = {PHASE: next((f"{PHASE} ({place(*kind.where[:2])})" for kind in largest if kind.where), PHASE)}
    elsewhere = [f"{kind.share:.0%} of the wall time is {names.get(kind.name, kind.name)}" for kind in largest]
    verdict = diagnosis.verdict
    if elsewhere:
        verdict = f"{'; '.join(elsewhere)}. Of an ordinary step: {verdict}"
    if unseen:
        verdict += f" Not explained: {'; '.join(unseen)}."
    mostly = left[account[0].name] >= account[0].share / 2  # else the findings explain more than what they don't
    notes = [note for note in diagnosis.notes if note.kind != caveats.NOT_EXPLAINED or mostly]
    held = loop.observation.wall
    seconds = Wall(loop.wall_s, float(held["recorded_s"]), loop.others_s, tuple(account), held["points"])
    return replace(diagnosis, verdict=verdict, notes=tuple(notes), wall=seconds)


def _at_most(finding: Finding, share: float) -> Finding:
    """The finding with a gain of at most this share.

    Of the host's work on a GPU's loop no more can be gained than the device idles; of an optimizer's steps no more than
    they take in all the iterations that were seen, of which few are recorded.
    """
    share = min(finding.gain_share, share)
    return replace(finding, gain_share=share, gain_ms=finding.gain_ms * share / max(finding.gain_share, 1e-9))


def _diagnosed(trace: Trace, least: float) -> tuple[Diagnosis, list[Finding]]:
    """The diagnosis without its findings, and all of them."""
    scene = Scene(trace)
    findings = _findings(scene, least)
    notes = [*products.reached(scene), *caveats.notes(scene), *needless.kept_graph(trace), *waiting.on_a_gpu(scene)]
    notes += [*caveats.unexplained(scene, findings), *trace.notes]
    bound = _bound(scene)
    diagnosis = Diagnosis(
        verdict=_verdict(scene, bound),
        bound=bound,
        steps=len(trace.steps),
        step_ms=account.step_ms(trace),
        account=scene.shares if scene.account else None,
        idle=scene.account.idle_shares if scene.account else {},
        host=None if scene.account else scene.shares,
        findings=(),
        notes=tuple(notes),
        warnings=tuple(caveats.warnings(scene)),
    )
    return diagnosis, findings


def _located(
    findings: list[Finding], located: list[Finding], costs: Diagnosis, detailed: Diagnosis, least: float
) -> list[Finding]:
    """The findings with the places of another profile, and that profile's own, which need stacks or shapes.

    What only those show may be the better advice, too: a profile without stacks doesn't hold who emptied a cache.

    Stacks slow the host, so of the latter the share of their part of the account counts.
    """
    by_name = {finding.finding: finding for finding in located}
    placed = []
    for finding in findings:
        if other := by_name.get(finding.finding):
            advice = other.advice if finding.detailed else finding.advice
            finding = replace(finding, where=other.where, advice=advice, spread=other.spread)
        placed.append(finding)
    names = {finding.finding for finding in findings}
    for other in (f for f in located if f.finding not in names and f.detailed):
        part = other.part
        share = other.gain_share * (costs.parts.get(part, 1.0) / max(detailed.parts.get(part, 1.0), 1e-9))
        if share >= least:
            placed.append(replace(other, gain_share=share, gain_ms=share * costs.step_ms, spans=[]))
    first = {finding.part for finding in findings[:1]}
    return sorted(placed, key=lambda f: (costs.bound in ("host", "input") and f.part not in first, -f.gain_share))


def _in_folder(folder: Path, late: int) -> tuple[Path, Source, list[Note], Path | None]:
    """The rank that the others wait for, `late` if that was observed, or the one profile of a run without ranks.

    And the source lines of any.
    """
    places = folder / PLACES if (folder / PLACES).is_file() else None
    files = [p for p in folder.iterdir() if p.name.endswith((".json", ".json.gz")) and p.is_file()]
    files = sorted(p for p in files if p.name not in (PLACES, SLOWEST) and not OBSERVED.fullmatch(p.name))
    if (of_late := folder / f"rank{late}.json.gz").is_file():
        return of_late, of_late, [], places
    if (folder / COSTS).is_file():
        files = [folder / COSTS]
    if not files:
        raise ValueError(f"{folder} holds no profile (*.json or *.json.gz)")
    if len(files) == 1:
        return files[0], files[0], [], places
    from .ranks import last_to_arrive

    return *last_to_arrive(files), places


def _findings(scene: Scene, least: float) -> list[Finding]:
    """What could bring the share `least` or more, first what holds the step up, then by gain."""
    findings = [finding for rule in RULES for finding in rule(scene)]
    findings += [replace(finding, detailed=True) for rule in DETAILED_RULES for finding in rule(scene)]
    own = [f for f in findings if f.part == account.IDLE and f.finding not in SPECIFIC]
    explained = union([span for f in own for span in f.spans])
    findings += host_work.slow_launches(scene, explained)
    findings += on_cpu.small_operators(scene, [f for f in findings if f.part == account.UPDATING])
    findings = [finding for finding in findings if finding.gain_share >= least]
    return sorted(findings, key=lambda f: (scene.host_bound and f.part != account.IDLE, -f.gain_share))


def _bound(scene: Scene) -> str:
    """The word for what bounds the step: what takes most, or the host where it never waits for the device."""
    if scene.account is None:
        if caveats.launches(scene):
            return "unknown"
        words = {
            "compute": scene.shares[account.OPERATORS] + scene.shares[account.UPDATING],
            "host": scene.shares[account.PYTHON_CODE],
            "input": scene.shares[account.LOADING],
            "copies": scene.shares[account.COPYING],
        }
        return max(words, key=words.__getitem__)
    idle = scene.account.idle_shares
    of_host = sum(idle.get(reason, 0.0) for reason in account.HOST_REASONS)
    host = {"host": of_host, "input": idle.get(account.IN_LOADER, 0.0)}
    if scene.host_bound and idle.get(account.START_UP, 0.0) < MOSTLY:
        return max(host, key=host.__getitem__)
    words = host | {
        "compute": scene.shares[account.COMPUTE],
        "communication": scene.shares[account.COMMUNICATION],
        "copies": scene.shares[account.COPIES],
        "start-up": idle.get(account.START_UP, 0.0) + idle.get(account.BEFORE_FIRST, 0.0),
        "unknown": idle.get(account.IN_WAIT, 0.0),
    }
    return max(words, key=words.__getitem__)


_CAUSES = {
    "compute": "the device is the limit",
    "host": "the host launches work more slowly than the device does it",
    "input": "the loader delivers batches more slowly than the device takes them",
    "communication": "communication is the limit",
    "copies": "copies are the limit",
    "start-up": "most of it is start-up, which a training pays once: record after some steps",
    "unknown": "the device shows no work while the host waits for it",
}
_CAUSES_ON_CPU = {
    "compute": "operators are the limit",
    "host": "Python is the limit",
    "input": "the loader is the limit",
    "copies": "copies of data are the limit",
    "unknown": "the device's events are missing, only launches are recorded",
}


def _verdict(scene: Scene, bound: str) -> str:
    largest = sorted(scene.shares.items(), key=lambda share: -share[1])
    shares = ", ".join(f"{part} {share:.0%}" for part, share in largest if share >= 0.01)
    verdict = f"{bound}: {(_CAUSES if scene.account else _CAUSES_ON_CPU)[bound]} ({shares})."
    start_up = scene.account.idle_shares.get(account.START_UP, 0.0) if scene.account else 0.0
    if bound != "start-up" and start_up >= START_UP_MATTERS:
        verdict += f" Start-up takes {start_up:.0%} of the time."
    if scene.host_bound:
        verdict += " The host doesn't run ahead: it is the device that waits, so faster kernels bring little yet."
    return verdict
