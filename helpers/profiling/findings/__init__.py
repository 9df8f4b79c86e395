"""What `diagnose` looks for: a file for each family, in it a function for each finding that takes a trace.

A rule is silent unless the trace proves what it says: what only slows a GPU is reported only of a GPU's trace, save
where the host's trace shows it as plainly (a host that reads a tensor, a size, a loop over parameters).
"""

from .finding import NAMES, Finding
from .graph import kept_graph, unused_results
from .launches import launch_bound, returned_memory, unfused_optimizer, zeroed_gradients
from .products import fp32_products, handmade_attention, unaligned_sizes
from .repeated import constant_work, separate_projections
from .settings import deterministic_convolutions, unbenchmarked_convolutions
from .waiting import host_waits, loader_waits, pageable_copies

__all__ = ["FROM_ABSENCE", "FROM_PRESENCE", "NAMES", "Finding"]

# What these report is there to be seen, in however little of a trace.
FROM_PRESENCE = (
    host_waits,
    pageable_copies,
    unaligned_sizes,
    fp32_products,
    handmade_attention,
    zeroed_gradients,
    returned_memory,
    deterministic_convolutions,
    unbenchmarked_convolutions,
)
# These conclude from something that did not happen, so they need all of it.
FROM_ABSENCE = (
    loader_waits,
    unfused_optimizer,
    launch_bound,
    kept_graph,
    unused_results,
    constant_work,
    separate_projections,
)
