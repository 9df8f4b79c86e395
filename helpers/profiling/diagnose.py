"""What is slow in a training loop, read from a profile of it.

    with profile(schedule=schedule(wait=1, warmup=2, active=5, repeat=1), record_shapes=True, with_stack=True) as prof:
        for batch in loader:
            train_step(batch)
            prof.step()
    print(diagnose(prof))           # or diagnose("trace.json.gz"), or a folder with a file for each rank

Findings about sizes need `record_shapes`; source lines need `with_stack`, which slows the host: record costs without.
`diagnose(before, after)` compares two profiles.
"""

from pathlib import Path

import torch

from . import hygiene
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
from .diagnosis import LEAST, SHOWN, Diagnosis, Finding
from .findings import Scene, needless, products, waiting
from .read_trace import read_trace
from .trace import Trace

# These report events that the trace holds, so an incomplete trace is enough.
FROM_PRESENCE = (
    waiting.host_waits,
    waiting.pageable_copies,
    waiting.exposed_copies,
    waiting.collectives,
    waiting.zeroed_gradients,
    waiting.returned_memory,
    products.unaligned_sizes,
    products.fp32_products,
    products.unfused_chains,
    products.layout_conversions,
    products.handmade_attention,
    products.deterministic_convolutions,
    products.unbenchmarked_convolutions,
)
# These conclude from the absence of events, so they need a complete trace.
FROM_ABSENCE = (
    waiting.loader_waits,
    waiting.unfused_optimizer,
    needless.unused_results,
    needless.constant_work,
    needless.separate_projections,
)


def diagnose(profile: "Trace | torch.profiler.profile | str | Path") -> Diagnosis:
    """Where a step's time goes, what bounds it, and what to change first, from a live profile or a saved trace."""
    trace = read_trace(profile)
    scene = Scene(trace)
    findings = _findings(scene)
    bound = _bound(scene)
    account = scene.account
    shares = {part: length(spans) / scene.us for part, spans in scene.parts.items()}
    notes = hygiene.notes(scene)
    if trace.complete:
        notes += needless.kept_graph(trace)
    notes += [*_further(findings[SHOWN:]), *hygiene.unexplained(scene, findings), *trace.notes]
    if not trace.complete:
        notes.append("of a trace with gaps only what is there is reported, not what seems missing")
    return Diagnosis(
        verdict=_verdict(scene, bound, shares, findings),
        bound=bound,
        steps=len(trace.steps),
        step_ms=step_ms(trace),
        account=shares if account else None,
        idle=account.idle_shares if account else {},
        host=None if account else shares,
        findings=tuple(findings[:SHOWN]),
        notes=tuple(notes),
    )


def _further(findings: list[Finding]) -> list[str]:
    told = [f"{f.finding} at {f.where}, up to {f.gain_ms:.3g} ms a step: {f.advice}" for f in findings]
    return [f"further: {text}" for text in told]


def _findings(scene: Scene) -> list[Finding]:
    """What could bring a hundredth or more, first what holds the step up, then by gain."""
    rules = FROM_PRESENCE + FROM_ABSENCE if scene.trace.complete else FROM_PRESENCE
    findings = [finding for rule in rules for finding in rule(scene)]
    if scene.trace.complete:
        explained = union([span for f in findings if f.part == IDLE for span in f.spans])
        findings += waiting.slow_launches(scene, explained)
    findings = [finding for finding in findings if finding.gain_share >= LEAST]
    return sorted(findings, key=lambda f: (scene.held_up and f.part != IDLE, -f.gain_share))


def _bound(scene: Scene) -> str:
    """The word for what bounds the step: what takes most, or the host where it never waits for the device."""
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
    if scene.held_up:
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
}


def _verdict(scene: Scene, bound: str, shares: dict[str, float], findings: list[Finding]) -> str:
    told = ", ".join(
        f"{part} {share:.0%}" for part, share in sorted(shares.items(), key=lambda p: -p[1]) if share >= 0.01
    )
    said = (_SAID if scene.account else _SAID_ON_CPU)[bound]
    verdict = f"{bound}: {said} ({told})."
    if scene.held_up:
        verdict += " The host doesn't run ahead: it is the device that waits, so faster kernels bring little yet."
    if findings:
        first = findings[0]
        verdict += f" Change first: {first.finding}, up to {first.gain_share:.0%} of the time."
    return verdict
