"""Chapter 7's experiments: correctness of each capture variant, savings by fusion, speed of each backend.

Tables are measured in this order: those for a GPU first, as GPU time is scarce, and capture last, as it takes minutes
of a C++ compiler and has the same result on every machine.
"""

from helpers.compilers import fusion as fused
from helpers.compilers import latency as latencies
from helpers.compilers import semantics as captured
from helpers.compilers import training as trained
from helpers.compilers.backends import AUTOTUNE, BACKENDS, COMPILE, EAGER, ONNX, OVERHEAD, SCRIPT, TRACE
from helpers.compilers.capture_cases import CASES
from helpers.compilers.models import BERT_BASE, RESNET_18, TINY_BERT, TINY_RESNET
from helpers.lab import experiment
from helpers.lab.records import Row


@experiment(
    small=[{"case": "softmax", "size": 2**14}],
    cpu=[{"case": case, "size": size} for case in fused.CASES for size in (2**20, 2**24)],
    version=2,
)
def fusion(case: str, size: int) -> list[Row]:
    """Kernels, bytes moved and time of each variant of a computation, against separate operations in eager mode."""
    names = fused.variants(case) if size > 2**14 else [fused.EAGER]
    return [fused.measure_fusion(case, variant, size) for variant in names]


def _trainings(*shapes: tuple[str, int]) -> list[Row]:
    return [
        {"model": model, "batch": batch, "backend": backend} for model, batch in shapes for backend in trained.BACKENDS
    ]


@experiment(
    small=[{"model": TINY_RESNET, "batch": 2, "backend": TRACE}],
    cpu=_trainings((RESNET_18, 16), (BERT_BASE, 4)),
    gpu=_trainings((RESNET_18, 16), (BERT_BASE, 4), (RESNET_18, 128), (BERT_BASE, 32)),
    version=2,
)
def training(model: str, batch: int, backend: str) -> Row:
    """Training steps by each compiler, in turn with eager's, after their losses were compared; bf16 on a GPU."""
    small = {"seconds": 1.0, "steps": 2} if model == TINY_RESNET else {"seconds": 5.0}
    return trained.measure_training(model, backend, batch, **small)


@experiment(
    small=[{"model": TINY_RESNET, "backend": TRACE, "length": None}],
    cpu=[
        {"model": model, "backend": backend, "length": length}
        for model, length in ((RESNET_18, None), (BERT_BASE, 14))
        for backend in (SCRIPT, TRACE, COMPILE)
    ],
    version=2,
)
def flawed(model: str, backend: str, length: int | None) -> Row:
    """The lecture's timing and the correct one, of the same models in the same process."""
    return latencies.measure_flawed(model, backend, length=length, seconds=1.0 if model == TINY_RESNET else 5.0)


def _latencies(*precisions: str) -> list[Row]:
    """Configurations in order of importance, as GPU time may run out.

    First ONNX Runtime and compile in fp32, at two batches, of both models (the chapter's goal); then the same backends
    at the other shapes; then the other backends, and last `max-autotune`, which takes longest to build.
    """
    shapes = [("fp32", model, batch) for batch in (1, 8) for model in (RESNET_18, BERT_BASE)]
    shapes += [("fp16", model, batch) for batch in (1, 8, 64) for model in (RESNET_18, BERT_BASE)]
    shapes.append(("fp32", RESNET_18, 64))
    first = (EAGER, COMPILE, OVERHEAD, ONNX)
    others = tuple(backend for backend in BACKENDS if backend not in (*first, AUTOTUNE))
    return [
        {"model": model, "batch": batch, "precision": precision, "backend": backend}
        for turn in (first, others, (AUTOTUNE,))
        for precision, model, batch in shapes
        for backend in turn
        if precision in precisions and backend in latencies.backends_for(model)
    ]


@experiment(
    small=[
        {"model": model, "batch": 1, "precision": "fp32", "backend": backend}
        for model in (TINY_RESNET, TINY_BERT)
        for backend in (EAGER, ONNX)
    ],
    cpu=_latencies("fp32"),
    # max-autotune times dozens of kernels for each product and convolution, minutes a build: only for batch 1.
    gpu=[c for c in _latencies("fp32", "fp16") if c["backend"] != AUTOTUNE or c["batch"] == 1],
    version=2,
)
def latency(model: str, batch: int, precision: str, backend: str) -> Row:
    """Latency of a model by each backend, in turn with eager's, after their outputs were compared."""
    seconds = 1.0 if model in (TINY_RESNET, TINY_BERT) else 5.0
    return latencies.measure_latency(model, backend, batch, precision=precision, seconds=seconds)


@experiment(small=[{"of": "TorchScript"}], cpu=[{"of": "TorchScript"}])
def deprecations(of: str) -> list[Row]:
    """Torch's deprecation warning for each function of TorchScript, and its successor."""
    return captured.deprecations()


@experiment(
    small=[{"case": "printing"}],
    cpu=[{"case": name} for name in CASES],
)
def semantics(case: str) -> list[Row]:
    """Outcome of capturing a function by each variant, and calling it along another path than its example's."""
    return [captured.measure_semantics(case, variant) for variant in captured.variants(case)]
