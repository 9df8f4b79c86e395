"""Chapter 1's variants: an optimizer step with and without scalers, a forward under each autocast; zero gradients."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.lab import Disagreement, device
from helpers.lab.timing import check_agreement

from .autocast import Autocast
from .dynamic_scaler import DynamicGradScaler

SCALE = 2.0**8

NO_SCALER, TORCHS, PLAIN, OURS = "no scaler", "torch.amp.GradScaler", "plain operations", "ours"
LOWEST, HIGHEST = -60, 20  # exponents that are told apart; fp16 ends at -24, with subnormal numbers
NO_AUTOCAST, TORCHS_AUTOCAST = "no autocast", "torch.autocast"


def decoder_shapes(million_parameters: float) -> list[tuple[int, ...]]:
    """Shapes of a decoder's weights and biases, together about so many million parameters."""
    hidden = 2 ** round(math.log2(math.sqrt(million_parameters * 1e4)))
    layers = max(round(million_parameters * 1e6 / (12 * hidden**2)), 1)
    matrices = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    norms = [(hidden,)] * 4
    return [shape for _ in range(layers) for shape in (*matrices, *((rows,) for rows, _ in matrices), *norms)]


def scaler_steps(parameters: list[Tensor]) -> dict[str, Callable[[], None]]:
    """Unscale, clip and fused AdamW step of parameters with scaled gradients, by variant."""
    optimizers = {name: torch.optim.AdamW(parameters, fused=True) for name in (NO_SCALER, TORCHS, PLAIN, OURS)}
    torchs, ours = torch.amp.GradScaler(device().type, init_scale=SCALE), DynamicGradScaler(init_scale=SCALE)
    for scaler in (torchs, ours):
        scaler.scale(torch.ones((), device=device()))  # moves its state to the device
    clip = partial(nn.utils.clip_grad_norm_, parameters, 1.0)

    def without_scaler() -> None:
        clip()
        optimizers[NO_SCALER].step()

    def torchs_step() -> None:
        torchs.unscale_(optimizers[TORCHS])
        clip()
        torchs.step(optimizers[TORCHS])
        torchs.update()

    def plain_step() -> None:
        """One gradient after the other; the host waits to know whether to step."""
        for parameter in parameters:
            parameter.grad.div_(SCALE)
        if torch.stack([torch.isfinite(parameter.grad).all() for parameter in parameters]).all().item():
            clip()
            optimizers[PLAIN].step()

    def our_step() -> None:
        ours.clip_grad_norm_(optimizers[OURS], 1.0)
        ours.step(optimizers[OURS])
        ours.update()

    return {NO_SCALER: without_scaler, TORCHS: torchs_step, PLAIN: plain_step, OURS: our_step}


def host_reads(step: Callable[[], None]) -> int:
    """The number of times a step reads a tensor's value on the host, each of which waits for the GPU."""
    return operations(step).count("aten::_local_scalar_dense")


def operations(step: Callable[[], None]) -> list[str]:
    """The names of torch's operations in a step, in order; on a GPU each but a view is one launch or a few."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function._schema.name)
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    with Names():
        step()
    return names


def regions(dtype: torch.dtype) -> dict[str, Callable[[], AbstractContextManager]]:
    """No autocast, torch's and ours."""
    kind = device().type
    return {
        NO_AUTOCAST: partial(torch.autocast, kind, enabled=False),
        TORCHS_AUTOCAST: partial(torch.autocast, kind, dtype=dtype),
        OURS: partial(Autocast, dtype=dtype, device_type=kind),
    }


def check_same_casts(
    model: nn.Module, run: Callable, ours: Callable, theirs: Callable, tolerance: float = 1e-2
) -> None:
    """Raise `Disagreement` unless each layer returns the same type under both regions, and values and gradients agree.

    Types are compared because the values of an autocast that casts nothing would be within the tolerance as well.
    """

    def outputs_and_gradients(region: Callable) -> list[Tensor]:
        outputs: list[Tensor] = []
        layers = [module for module in model.modules() if next(module.children(), None) is None]
        hooks = [layer.register_forward_hook(lambda *call: outputs.append(call[-1].detach())) for layer in layers]
        try:
            run(region)
        finally:
            for hook in hooks:
                hook.remove()
        return outputs + [parameter.grad for parameter in model.parameters()]

    runs = {TORCHS_AUTOCAST: partial(outputs_and_gradients, theirs), OURS: partial(outputs_and_gradients, ours)}
    expected_types, types = ([tensor.dtype for tensor in outputs()] for outputs in runs.values())
    if types != expected_types:
        layer = next(i for i, pair in enumerate(zip(types, expected_types, strict=True)) if pair[0] != pair[1])
        got, expected = types[layer], expected_types[layer]
        raise Disagreement(f"layer {layer} returns {got} under our Autocast, {expected} under torch's")
    check_agreement(runs, tolerance)


def count_exponents(values: Tensor) -> Tensor:
    """Counts of values by exponent: at 0 the exact zeros, then LOWEST to HIGHEST. Nothing is read on the host."""
    magnitude = values.detach().float().abs()
    exponent = torch.frexp(magnitude).exponent - 1
    bins = torch.where(magnitude == 0, 0, exponent.clamp(LOWEST, HIGHEST) - LOWEST + 1)
    return torch.bincount(bins.flatten().long(), minlength=HIGHEST - LOWEST + 2)


def zero_share(grads: list[Tensor]) -> Tensor:
    """The share of all their values that is exactly zero."""
    return sum((g == 0).sum() for g in grads) / sum(g.numel() for g in grads)
