"""What `diagnose` looks for: a function for each finding, which takes a trace.

    waiting     who waits for whom: host, device, loader, copies; and work in too many pieces
    products    matrix products and convolutions: sizes, types, settings, handmade attention
    needless    work that nothing needs: graphs, results, constants built again, one input multiplied three times

A rule is silent unless the trace proves what it says: what only slows a GPU is reported only of a GPU's trace, save
where the host's trace shows it as plainly (a host that reads a tensor, a size, a loop over parameters).
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
    """`count` and `cost_ms` are means over the steps. A cost of NaN is one that no trace shows; `basis` says why."""

    finding: str
    where: str
    count: float
    cost_ms: float
    basis: str
    advice: str
