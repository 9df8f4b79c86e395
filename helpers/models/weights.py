"""Llama's weights by transformers' names: where they lie here."""

from collections.abc import Callable

from torch import Tensor, nn


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
