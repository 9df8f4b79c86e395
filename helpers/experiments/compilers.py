"""What chapter 7 measures: what each way of capturing gets wrong, what fusion saves, and how fast each runtime is.

The tables stand in the order in which they are measured: on a GPU whose time is short those of a GPU come first, and
what is captured wrongly, which takes minutes of a C++ compiler and says the same on every machine, comes last.
"""

from helpers.compilers import fusion as fused
from helpers.compilers import latency as latencies
from helpers.compilers import semantics as captured
from helpers.compilers import training as trained
from helpers.compilers.backends import AUTOTUNE, COMPILE, EAGER, ONNX, OVERHEAD, SCRIPT, TRACE, WAYS
from helpers.compilers.inputs import BERT_BASE, RESNET_18, TINY_BERT, TINY_RESNET
from helpers.compilers.specimens import SPECIMENS
from helpers.compilers.successor import deprecations as read_deprecations
from helpers.lab import device, experiment
from helpers.lab.records import STATUS, Row

LEFT = "left to a GPU"  # it would take a CPU too long, or say nothing
ONCE = "left out: built for batch 1 alone, which takes minutes"


@experiment(
    small=[{"case": "softmax", "size": 2**14}],
    cpu=[{"case": case, "size": size} for case in fused.CASES for size in (2**20, 2**24)],
    version=2,
)
def fusion(case: str, size: int) -> list[Row]:
    """Kernels and bytes moved by each way of doing the same, and its time beside that of separate operations."""
    names = fused.ways(case) if size > 2**14 else [fused.EAGER]
    rows = [fused.measure_fusion(case, way, size) for way in names]
    return [{name: value for name, value in row.items() if name not in ("case", "size")} for row in rows]


@experiment(
    small=[{"model": TINY_RESNET, "batch": 2, "way": TRACE}],
    cpu=[
        {"model": model, "batch": batch, "way": way}
        for model, batch in ((RESNET_18, 16), (BERT_BASE, 4), (RESNET_18, 128), (BERT_BASE, 32))
        for way in trained.WAYS
    ],
    version=2,
)
def training(model: str, batch: int, way: str) -> Row:
    """Steps of training under each compiler, in turn with eager's, once the losses agree; bf16 on a GPU."""
    if device().type != "cuda" and batch in (128, 32):
        return {STATUS: LEFT}
    small = {"seconds": 1.0, "steps": 2} if model == TINY_RESNET else {"seconds": 5.0}
    return trained.measure_training(model, way, batch, **small)


@experiment(
    small=[{"model": TINY_RESNET, "way": TRACE, "length": None}],
    cpu=[
        {"model": model, "way": way, "length": length}
        for model, length in ((RESNET_18, None), (BERT_BASE, 14))
        for way in (SCRIPT, TRACE, COMPILE)
    ],
    version=2,
)
def flawed(model: str, way: str, length: int | None) -> Row:
    """The lecture's way of timing, and the right one, of the same models in the same process."""
    return latencies.measure_flawed(model, way, length=length, seconds=1.0 if model == TINY_RESNET else 5.0)


def _latencies() -> list[Row]:
    """Halves, and BERT's batch of 64, are for a GPU. What the goal is about comes first, for its time may be short.

    That is ONNX Runtime and compile in fp32, at two batches, of both models; then the same ways at the other shapes;
    then the other ways, and `max-autotune`, which takes longest to build, at the very end.
    """
    shapes = [("fp32", model, batch) for batch in (1, 8) for model in (RESNET_18, BERT_BASE)]
    shapes += [("fp16", model, batch) for batch in (1, 8, 64) for model in (RESNET_18, BERT_BASE)]
    shapes.append(("fp32", RESNET_18, 64))
    first = (EAGER, COMPILE, OVERHEAD, ONNX)
    others = tuple(way for way in WAYS if way not in (*first, AUTOTUNE))
    return [
        {"model": model, "batch": batch, "precision": precision, "way": way}
        for turn in (first, others, (AUTOTUNE,))
        for precision, model, batch in shapes
        for way in turn
        if way in latencies.ways(model)
    ]


@experiment(
    small=[
        {"model": model, "batch": 1, "precision": "fp32", "way": way}
        for model in (TINY_RESNET, TINY_BERT)
        for way in (EAGER, ONNX)
    ],
    cpu=_latencies(),
    version=2,
)
def latency(model: str, batch: int, precision: str, way: str) -> Row:
    """A model's answer to a batch by each runtime, in turn with eager's, once the outputs agree.

    On a GPU `max-autotune` is built for batch 1 alone: it times dozens of kernels for each product and convolution.
    """
    on_gpu = device().type == "cuda"
    if not on_gpu and precision == "fp16":
        return {STATUS: LEFT}
    if on_gpu and way == AUTOTUNE and batch > 1:
        return {STATUS: ONCE}
    return latencies.measure_latency(
        model, way, batch, precision=precision, seconds=1.0 if model in (TINY_RESNET, TINY_BERT) else 5.0
    )


@experiment(small=[{"of": "TorchScript"}], cpu=[{"of": "TorchScript"}])
def deprecations(of: str) -> list[Row]:
    """What torch itself says of each call that TorchScript consists of, and what there is instead."""
    return read_deprecations()


@experiment(
    small=[{"specimen": "printing"}],
    cpu=[{"specimen": name} for name in SPECIMENS],
)
def semantics(specimen: str) -> list[Row]:
    """A function captured by each way, then called so that it goes another way than its example: what comes of it."""
    rows = [captured.measure_semantics(specimen, way) for way in captured.ways(specimen)]
    return [{name: value for name, value in row.items() if name != "specimen"} for row in rows]
