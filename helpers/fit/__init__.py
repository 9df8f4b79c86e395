"""Where memory goes and how long a step takes, on devices that are not there.

fit(plan, memory_gib)       parts, peak, whether it fits, and what would make it fit
fit_model(model, …)         the same of a transformers configuration or class, or of any module, on one device

rank_memory(job, ranks)     the memory of one real rank whose others don't exist; measured on CUDA, counted elsewhere
rank_peak(job, ranks)       the same by part, counted with few layers
count(setup)                the memory of a step on one device by part, counted anywhere; uncompiled setups
transfers(job, ranks)       the bytes that ranks exchange in a step, derived
predict(job, ranks, …)      the time of a step, from those bytes and the time of computation
speed(run)                  tokens/s of a run on a GPU by name, with the band that published runs showed
estimate(run, gpu, price)   the same with its cost and what would make it faster
assumptions()               what all of it takes for granted, with sources
"""

from .anybody import COUNTED, UnknownModel, fit_model
from .cards import Card
from .estimate import config_run, estimate, estimate_text, plan_run
from .plan import Plan, fit, text, this_memory_gib
from .rank import count, rank_memory, rank_peak
from .scaling import CLUSTERS, LINKS, Cluster, Link, assumptions, predict
from .speed import speed
from .traffic import Transfer, transfers

__all__ = [
    "CLUSTERS",
    "COUNTED",
    "LINKS",
    "Card",
    "Cluster",
    "Link",
    "Plan",
    "Transfer",
    "UnknownModel",
    "assumptions",
    "config_run",
    "count",
    "estimate",
    "estimate_text",
    "fit",
    "fit_model",
    "plan_run",
    "predict",
    "rank_memory",
    "rank_peak",
    "speed",
    "text",
    "this_memory_gib",
    "transfers",
]
