"""Where memory goes and how long a step takes, on devices that are not there.

fit(plan, memory_gib)       parts, peak, whether it fits, and what would make it fit
                            of presets, transformers' configurations and classes, and any module

rank_memory(job, ranks)     the memory of one real rank whose others don't exist; measured on CUDA, counted elsewhere
rank_peak(job, ranks)       the same by part, counted with few layers
count(setup)                the memory of a step on one device by part, counted anywhere
step_time(setup, card)      its time on a GPU, from its kernels and launches, counted anywhere
transfers(job, ranks)       the bytes that ranks exchange in a step, derived
predict(job, ranks, …)      the time of a step, from those bytes and the time of computation
speed(run)                  tokens/s of a run on a GPU by name, with the band that published runs showed
estimate(run, gpu, price)   the same with its cost and what would make it faster
"""

from ..lab.cards import Card
from .plan import Plan, estimate, estimate_text, fit, peak, plan_run, text, this_memory_gib
from .ranks import CLUSTERS, predict, rank_memory, rank_peak, transfers
from .speed import speed
from .step import count, step_time

__all__ = [
    "CLUSTERS",
    "Card",
    "Plan",
    "count",
    "estimate",
    "estimate_text",
    "fit",
    "peak",
    "plan_run",
    "predict",
    "rank_memory",
    "rank_peak",
    "speed",
    "step_time",
    "text",
    "this_memory_gib",
    "transfers",
]
