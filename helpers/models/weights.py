"""Llama's weights by transformers' names: where they lie here, and copying them with nothing missing or left over."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn


@torch.no_grad()
def copy_weights(views: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into the views of the same names.

    Before anything is copied, a `ValueError` names a weight that is missing, has no place, or has another shape.
    """
    if missing := views.keys() - weights.keys():
        raise ValueError(f"the weights lack {_first(missing)}; the model has {len(views)}")
    if left_over := weights.keys() - views.keys():
        raise ValueError(f"the model has no place for {_first(left_over)}; {len(weights)} weights are given")
    for name, view in views.items():
        if view.shape != weights[name].shape:
            raise ValueError(f"{name} is {tuple(weights[name].shape)}; it must be {tuple(view.shape)}")
    for name, view in views.items():
        view.copy_(weights[name])


def _first(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first!r}" + (f" and {len(others)} more" if others else "")


def attention_weights(attention: nn.Module, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Views of what `of` makes of the weights of Llama's attention, whether its products are fused or not."""
    if attention.fused:
        q, k, v = of(attention.qkv.weight).split(attention.sizes)
    else:
        q, k, v = (of(linear.weight) for linear in (attention.q, attention.k, attention.v))
    return {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": of(attention.out.weight)}


def mlp_weights(mlp: nn.Module, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The same of Llama's feed-forward layer, which may be one of `helpers.swiglu`."""
    if hasattr(mlp, "W"):  # `helpers.swiglu` stores them transposed
        gate, up, down = (of(weight).t() for weight in (mlp.W, mlp.V, mlp.U))
    elif mlp.fused:
        (gate, up), down = of(mlp.gate_up.weight).chunk(2), of(mlp.down.weight)
    else:
        gate, up, down = (of(linear.weight) for linear in (mlp.gate, mlp.up, mlp.down))
    return {"gate_proj": gate, "up_proj": up, "down_proj": down}
