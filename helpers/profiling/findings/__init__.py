"""The rules of `diagnose`: a function for each finding, from a trace to its `Finding`s.

    waiting     the host waits for the device, the device for the loader, both for copies; work in too many kernels
    products    matrix products and convolutions: sizes, types, settings, attention from separate ops
    needless    graphs that no backward uses, unused results, constants rebuilt in each step, separate Q, K and V

A rule reports only what the trace proves. What slows only a GPU is reported from a GPU's trace, except where the CPU's
trace proves it too (a tensor read by the host, an unaligned size, a loop over parameters).
"""

from dataclasses import dataclass

HOST_WAITS = "host synchronisation"
LOADER_WAITS = "device idle while the loader works"
PAGEABLE = "copies from pageable memory"
UNALIGNED = "sizes that miss the tensor cores"
FP32 = "fp32 products"
ATTENTION = "attention from matmul and softmax"
UNFUSED = "unfused optimizer"
TINY_KERNELS = "many tiny kernels"
ZEROED = "gradients zeroed, not dropped"
RETURNED = "memory returned and reserved again"
KEPT_GRAPH = "graph kept in evaluation"
UNUSED = "result never used"
CONSTANT = "repeated constant work"
SEPARATE = "separate projections of one input"
DETERMINISTIC = "deterministic cuDNN"
UNBENCHMARKED = "unbenchmarked cuDNN"


@dataclass(frozen=True)
class Finding:
    """`count` and `cost_ms` are means over the steps. A cost that no trace shows is NaN; `basis` says why."""

    finding: str
    where: str
    count: float
    cost_ms: float
    basis: str
    advice: str
