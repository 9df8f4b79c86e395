"""What is slow in a training loop, read from a profile of it.

    with profile(schedule=schedule(wait=1, warmup=2, active=5, repeat=1), record_shapes=True, with_stack=True) as prof:
        for batch in loader:
            train_step(batch)
            prof.step()
    diagnose(prof)                  # or diagnose("trace.json.gz")

Findings about sizes need `record_shapes`, source lines need `with_stack`. `basis` says whether a cost is measured,
estimated or a bound. Costs may overlap, so they don't add up to the time that could be saved.
"""

from pathlib import Path

import pandas as pd
import torch

from .findings import needless, products, waiting
from .read_trace import read_trace
from .trace import Trace

# These report events that the trace holds, so an incomplete trace is enough.
FROM_PRESENCE = (
    waiting.host_waits,
    waiting.pageable_copies,
    products.unaligned_sizes,
    products.fp32_products,
    products.handmade_attention,
    waiting.zeroed_gradients,
    waiting.returned_memory,
    products.deterministic_convolutions,
    products.unbenchmarked_convolutions,
)
# These conclude from the absence of events, so they need a complete trace.
FROM_ABSENCE = (
    waiting.loader_waits,
    waiting.unfused_optimizer,
    waiting.launch_bound,
    needless.kept_graph,
    needless.unused_results,
    needless.constant_work,
    needless.separate_projections,
)

COLUMNS = ["finding", "where", "count", "cost_ms", "share", "basis", "advice"]


def diagnose(profile: "Trace | torch.profiler.profile | str | Path") -> pd.DataFrame:
    """Findings in a live profile or a saved trace, most expensive first; none if the loop is clean.

    `count` and `cost_ms` are means over the steps, `share` is `cost_ms` as a fraction of the mean step.
    `.attrs["notes"]` says what the trace can't show and what couldn't be read.
    """
    trace = read_trace(profile)
    rules = FROM_PRESENCE + FROM_ABSENCE if trace.complete else FROM_PRESENCE
    rows = [vars(finding) for rule in rules for finding in rule(trace)]
    table = pd.DataFrame(rows, columns=[c for c in COLUMNS if c != "share"])
    table.insert(COLUMNS.index("share"), "share", table["cost_ms"].astype(float) / trace.step_ms)
    table = table.sort_values("cost_ms", ascending=False, na_position="last", kind="stable", ignore_index=True)
    unseen = [] if trace.complete else ["of a trace with gaps only what is there is reported, not what seems missing"]
    table.attrs |= {"notes": trace.notes + unseen, "steps": len(trace.steps), "step_ms": trace.step_ms}
    return table
