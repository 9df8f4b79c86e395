"""The ladder on one device, and its peers."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ...lab import Worth, device, experiment, in_fresh_process
from ...lab.machine import missing_because
from ...lab.records import Row
from ...rush import CPU_LADDER, LADDER, Setup, run, rung
from ...rush.measurement import ON_CPU_LOSS_STEPS, first_loss
from ...rush.setup import CHANGES, LADDERS, START, stands_on
from ...training.step import WARM_UP
from . import transformers_llama

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
PEERS = f"median_ms {SPREAD} baseline baseline_ms ratio text step_gib ours_step_gib loss ours_loss"


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


@experiment(
    small=[SMALL | {"step": step} for step in ("no optimisation", "fused AdamW", "FlashAttention", "batch 2")],
    cpu=[ON_CPU | {"step": step} for step in CPU_LADDER],
    gpu=[MEDIUM | PAIRED | {"step": step} for step in LADDER],
    big_gpu=[FULL | PAIRED | {"step": step} for step in LADDER],
    version=3,
    missing=missing,
    columns=RUN_PAIRED + " seed_loss?",
    worth=Worth(
        100,
        "each change of the ladder, with loss, memory and MFU",
        cpu=21.9,
        gpu=20,
        big_gpu=15.5,
        headline={"step": HEADLINES},
        on_gpu=1,
        one_run=True,
    ),
)
def ladder(model: str, sequence: int, step: str, trial_s: float = 0.0) -> Row:
    """Each step of the ladder: speed, memory, and the loss after equally many training steps on the same text.

    On a GPU, whose trainers can live in one process, in turns with the step that it stands on (on a CPU: `pairs`).
    Where a step changes what is computed, `seed_loss` is the loss of the step that it stands on with another seed.
    """
    setup = setup_of(model, sequence, step)
    if step == START:
        return run_apart(setup)
    below = stands_on(step, device().type)
    baseline = setup_of(model, sequence, below)
    row = beside(setup, below, baseline, trial_s) if trial_s else run_apart(setup)
    if LADDERS[device().type][1].get(step) != CHANGES:
        return row
    return row | {"seed_loss": apart(baseline, first_loss, baseline.possible(device()), seed=1)}


@experiment(
    small=[SMALL | {"variant": "transformers"}],
    cpu=[
        ON_CPU | {"variant": variant}
        for variant in (
            "transformers, eager attention",
            "transformers",
            "transformers, fused AdamW, compile",
            f"transformers, fused AdamW, compile{transformers_llama.ALIKE}",
        )
    ],
    gpu=[MEDIUM | {"variant": variant} for variant in transformers_llama.VARIANTS],
    big_gpu=[FULL | {"variant": variant} for variant in transformers_llama.VARIANTS],
    version=3,
    missing=lambda variant, **sizes: (
        missing_because(*transformers_llama.needs(variant), "native bf16") or missing(**sizes)
    ),
    columns=PEERS,
    worth=Worth(40, "the same training by transformers and Liger", cpu=50.3, gpu=40, big_gpu=22),
)
def peers(model: str, sequence: int, variant: str) -> Row:
    """The same model with the same weights and batch, trained by transformers and by us, in turn in one process.

    Both have the process's allocator, which on a CPU is the best rung's. Of 140 GB they need 100 at a batch of 4.
    """
    setup = setup_of(model, sequence)
    setup = replace(setup, batch=min(setup.batch, 4))
    return apart(setup, transformers_llama.against, variant, setup)
