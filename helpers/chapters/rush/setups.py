"""The setups that the chapter measures: steps of a ladder, run in a process with their allocator."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ...lab import Row, device, in_fresh_process, missing_because
from ...rush import Setup, build_trainer, run, rung
from ...rush.measurement import ON_CPU_LOSS_STEPS, text_tokens
from ...rush.setup import START
from ...training.trainer import WARM_UP

Measured = TypeVar("Measured")
TINY, SIXTY_M, ONE_B = "tiny", "llama-60m", "llama-3.2-1b"
# Steps of the ladder by device type: of `peers`, of `checkpointing`
BEST = {"cuda": "batch 8", "cpu": "fused projections"}
BEFORE_LENGTHS = {"cuda": "chunked cross-entropy", "cpu": "chunked cross-entropy"}
SMALL = {"model": TINY, "sequence": 64}
MEDIUM = {"model": SIXTY_M, "sequence": 2048}
ON_CPU = {"model": SIXTY_M, "sequence": 1024}  # a step of the plain loop takes two seconds
FULL = {"model": ONE_B, "sequence": 2048}
PAIRED = {"trial_s": 5.0}  # on a GPU, a rung's steps take turns with its baseline's for so long
BATCHES = 4  # different ones, in turn, of a process that trains alone
FEW = {"steps": 4, "warmup": 1, "loss_steps": 4}  # for the tiny preset
WARM = WARM_UP + 1  # `loss_steps` where only speed matters: enough to compile and to capture a graph


HEADLINES = (
    START,
    "TF32",
    "mixed precision",
    "fused AdamW",
    "FlashAttention",
    "compile",
    "batch 4",
    "batch 8",
    "float8",
)
SPREAD = "p20_ms p80_ms n"
PRODUCT = "product_library? product_tflops product_p20_tflops? product_clock_mhz? product_power_w?"
RUN = f"tokens_per_s step_ms {SPREAD} peak_gib mfu? {PRODUCT} matmul_share compile_s? loss text"
RUN_PAIRED = RUN + " baseline? baseline_ms? unpaired?"


def apart(setup: Setup, fn: Callable[..., Measured], *arguments, **options) -> Measured:
    """`fn(…)`; on a CPU in a fresh process, with the setup's allocator."""
    if device().type == "cuda" or setup.model == TINY:
        return fn(*arguments, **options)
    return in_fresh_process(fn, *arguments, environment=setup.environment, **options)


def run_apart(setup: Setup, **options: object) -> Row:
    on_cpu = {"loss_steps": ON_CPU_LOSS_STEPS} if device().type == "cpu" else {}
    return apart(setup, run, setup, **(options | FEW if setup.model == TINY else on_cpu | options))


def beside(setup: Setup, name: str, baseline: Setup, trial_s: float, **options: object) -> Row:
    """A setup's row with the ratio to the baseline of this name, or to the nearest one that is possible here."""
    baseline = baseline.possible(device())
    if baseline == setup:
        return run_apart(setup, **options)
    return run_apart(setup, baseline=baseline, seconds=trial_s, **options) | {"baseline": name}


def setup_of(model: str, sequence: int, step: str = "", checkpointing: str = "", **_: object) -> Setup:
    """A configuration's setup, a step of the device's ladder; the tiny model's is uncompiled, to save time."""
    names = BEFORE_LENGTHS if checkpointing else BEST
    setup = rung(step or names[device().type], Setup(model=model, sequence=sequence), device())
    setup = replace(setup if step else setup.possible(device()), compile="none") if model == TINY else setup
    return replace(setup, batch=1, checkpointing=checkpointing) if checkpointing else setup


def missing(**config: object) -> str:
    """Why a configuration's setup can't run here, as a status; "" if it can."""
    try:
        setup = setup_of(**config)
        units = ["native bf16"] if setup.precision in ("amp-bf16", "bf16") else []
        reason = setup.missing_because(device()) or missing_because(*units)
    except ValueError as error:  # on an old GPU without a compiler a rung isn't compiled, which its change may need
        reason = str(error)
    return f"not here: {reason}" if reason else ""


def training_step(setup: dict[str, object]) -> Callable[[], object]:
    """Train by a setup on the text's batches, one a call."""
    chosen = Setup(**setup)
    trainer, batches = build_trainer(chosen), itertools.cycle(text_tokens(chosen, BATCHES))
    return lambda: trainer.step(next(batches))
