"""Checks that judge any implementation of what the tasks ask for: the reader's, ours, torch's.

    from helpers import checks
    checks.swiglu(MySwigluFunction)

A check prints a line for each thing that must hold, with the figure that shows it, and raises nothing: what raises
inside counts as failed, with its message. `check.passed` says whether all held. What isn't written yet (it raises
`NotImplementedError`) is "not attempted". References are torch's own operations, gradcheck or brute force; the checks
know nothing of the rest of this library. Each takes a second or a few. `numbers` judges what is worked out on paper.
"""

from .batching import batch_sampler, packed_attention, packing
from .check import Check
from .compilers import graphs, guarded_trace
from .data import class_scores, forgetting, tar_read
from .language import collated, dataset, positional_encoding, sequenced, token_accuracy, token_loss
from .layers import chunked_loss, fused_norm, mfu, swiglu
from .modules import module_times
from .numbers import number, numbers, reading
from .precision import accumulated_step, autocast, grad_scaler

__all__ = [
    "Check",
    "accumulated_step",
    "autocast",
    "batch_sampler",
    "chunked_loss",
    "class_scores",
    "collated",
    "dataset",
    "forgetting",
    "fused_norm",
    "grad_scaler",
    "graphs",
    "guarded_trace",
    "mfu",
    "module_times",
    "number",
    "numbers",
    "packed_attention",
    "packing",
    "positional_encoding",
    "reading",
    "sequenced",
    "swiglu",
    "tar_read",
    "token_accuracy",
    "token_loss",
]
