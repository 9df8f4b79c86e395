"""One finding, and the names that findings have."""

from dataclasses import dataclass

HOST_WAITS = "host synchronisation"
LOADER_WAITS = "device idle while the loader works"
PAGEABLE = "copies from pageable memory"
UNALIGNED = "sizes that miss the tensor cores"
FP32 = "fp32 products"
ATTENTION = "attention from matmul and softmax"
OPTIMIZER = "unfused optimizer"
TINY_KERNELS = "many tiny kernels"
ZEROED = "gradients zeroed, not dropped"
RETURNED = "memory returned and reserved again"
KEPT_GRAPH = "graph kept in evaluation"
UNUSED = "result never used"
CONSTANT = "repeated constant work"
SEPARATE = "separate projections of one input"
DETERMINISTIC = "deterministic cuDNN"
UNBENCHMARKED = "unbenchmarked cuDNN"

NAMES = (
    HOST_WAITS,
    LOADER_WAITS,
    PAGEABLE,
    UNALIGNED,
    FP32,
    ATTENTION,
    OPTIMIZER,
    TINY_KERNELS,
    ZEROED,
    RETURNED,
    KEPT_GRAPH,
    UNUSED,
    CONSTANT,
    SEPARATE,
    DETERMINISTIC,
    UNBENCHMARKED,
)


@dataclass(frozen=True)
class Finding:
    """`count` and `cost_ms` are means over the steps. A cost of NaN is one that no trace shows; `basis` says why."""

    finding: str
    where: str
    count: float
    cost_ms: float
    basis: str
    advice: str
