"""Chapter 7's experiments: correctness of each capture variant, savings by fusion, speed of each backend.

All variants or backends of a row's configuration are built first and then timed in turn, with one baseline.
Tables come in the order of worth, as a measurement may be cut short.
"""

from collections.abc import Iterable

from helpers.compilers import measure_semantics
from helpers.compilers.backends import COMPILE, OVERHEAD, TRACE
from helpers.compilers.capture import VARIANTS
from helpers.compilers.capture_cases import CASES
from helpers.lab import experiment
from helpers.lab.records import Row

from . import fusing, inference, training_steps
from .workloads import BERT_BASE, LLAMA, RESNET_18, TINY_BERT, TINY_RESNET

BOTH = (RESNET_18, BERT_BASE)
TIMES = (
    "median_ms p20_ms p80_ms n baseline baseline_ms ratio? ratio_p20? ratio_p80? low? high? pairs? starts? verdict? "
)
SPEEDS = TIMES + "p99_ms samples_per_s speedup speedup_p20 speedup_p80 threads build_s "


def _each(models: Iterable[str], precision: str, batches: Iterable[int]) -> list[Row]:
    return [{"model": model, "precision": precision, "batch": batch} for model in models for batch in batches]


@experiment(
    small=_each((TINY_RESNET, TINY_BERT), "fp32", (1,)),
    cpu=_each(BOTH, "fp32", (1, 8)),
    gpu=_each(BOTH, "fp32", (1, 8)) + _each(BOTH, "fp16", (1, 8, 64)),
    version=3,
    columns=SPEEDS + "backend version error tolerance",
)
def latency(model: str, precision: str, batch: int) -> list[Row]:
    """Latency of a model by each backend and by eager, in turn, after their outputs were compared."""
    backends = [TRACE] if model in (TINY_RESNET, TINY_BERT) else []
    return inference.measure_latency(model, batch, backends, precision=precision, seconds=5.0)


@experiment(
    small=_each((TINY_BERT,), "fp32", (2,)),
    cpu=_each((RESNET_18,), "fp32", (8,)) + _each((BERT_BASE,), "bf16", (4,)) + _each((LLAMA,), "bf16", (8,)),
    gpu=_each((RESNET_18,), "bf16", (16, 128))
    + _each((BERT_BASE,), "bf16", (4, 32))
    + _each((LLAMA,), "bf16", (2, 16)),
    version=3,
    columns=SPEEDS
    + "backend optimizer gradient_error gradient_tolerance loss eager_loss loss_difference steps break_even_steps?",
)
def training(model: str, precision: str, batch: int) -> list[Row]:
    """Training steps by each compiler and by eager, in turn, after their losses and gradients were compared."""
    backends = {TINY_BERT: (TRACE,), RESNET_18: (TRACE, COMPILE, OVERHEAD)}.get(model, (COMPILE, OVERHEAD))
    return training_steps.measure_training(model, batch, backends, precision=precision, seconds=5.0)


@experiment(
    small=[{"case": "softmax", "size": 2**14}],
    cpu=[{"case": case, "size": 2**23} for case in fusing.CASES],
    gpu=[{"case": case, "size": size} for case in fusing.CASES for size in (2**20, 2**24)],
    version=3,
    columns=TIMES + "kind variant kernels kernel_names bytes_moved bytes_least share_of_least error",
)
def fusion(case: str, size: int) -> list[Row]:
    """Kernels, bytes moved and time of each variant of a computation, against separate operations in eager mode."""
    return fusing.measure_fusion(case, size, rounds=20)


@experiment(
    small=[{"case": "printing"}],
    cpu=[{"case": name} for name in CASES],
    version=2,
    columns="variant outcome message? breaks recompiles",
)
def semantics(case: str) -> list[Row]:
    """Outcome of capturing a function by each variant, and calling it along another path than its example's."""
    return [measure_semantics(case, variant) for variant in VARIANTS]
