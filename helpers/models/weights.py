"""Weights by transformers' names: where they lie in our models, and copying them with nothing missing or left over."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

# transformers' names of BERT's parts -> ours; q, k and v are one product here.
BERT_NAMES = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "segments",
    "embeddings.LayerNorm": "norm",
    "pooler.dense": "pooler",
}
BERT_LAYER_NAMES = {
    "attention.output.dense": "attention.out",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "norm2",
}


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


def bert_weights(model: nn.Module) -> dict[str, Tensor]:
    """Views of BERT's weights by the names of transformers' `BertModel`."""
    ours = {name: parameter.detach() for name, parameter in model.named_parameters()}
    names = dict(BERT_NAMES)
    for i in range(len(model.layers)):
        names |= {f"encoder.layer.{i}.{theirs}": f"layers.{i}.{our}" for theirs, our in BERT_LAYER_NAMES.items()}
    kinds = ("weight", "bias")
    views = {
        f"{theirs}.{kind}": ours[f"{our}.{kind}"]
        for theirs, our in names.items()
        for kind in kinds
        if f"{our}.{kind}" in ours  # embeddings have no bias
    }
    for i in range(len(model.layers)):
        for kind in kinds:
            parts = zip(("query", "key", "value"), ours[f"layers.{i}.attention.qkv.{kind}"].chunk(3), strict=True)
            views |= {f"encoder.layer.{i}.attention.self.{name}.{kind}": part for name, part in parts}
    return views
