"""The kernels of a step, counted on fake tensors: operations, exponentials and bytes of each launch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_scaled_mm")
SCATTERS = ("aten::embedding_dense_backward", "aten::index_put", "aten::scatter_add", "aten::sort")
IGNORED = ("prim::device", "profiler::_record_function_enter_new", "profiler::_record_function_exit")
NOTHING = {  # operators that launch no kernel, beside views
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::_unsafe_view", "aten::_local_scalar_dense", *IGNORED,
}  # fmt: skip
BACKWARD_PRODUCTS = 2.5  # of attention's two in forward: five, as scores are computed again


@dataclass(frozen=True)
class Kernel:
    """A launch: its kind ("product", "attention", "eager", "fused", "optimizer"), and what it has to do.

    `bytes` are those that it must read and write, `dtype` is what it multiplies in.
    """

    kind: str
    bytes: float = 0.0
    flops: float = 0.0
    exponentials: float = 0.0
    dtype: torch.dtype = torch.float32


class Meter(TorchDispatchMode):
    """Lists the kernels of all operators while it is active, and counts these operators, views among them."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.operators = 0  # that the host dispatches one by one
        self.kind = "eager"  # of a kernel that is neither product nor attention

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as the `Ledger` does

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.operators += function._schema.name not in IGNORED
        if not launches_nothing(function):
            self.kernels += kernels(function, (args, kwargs), result, self.kind)
        return result


def launches_nothing(function: Any) -> bool:
    return function.is_view or function._schema.name in NOTHING


def stands_alone(function: Any) -> bool:
    """Whether no compiler fuses an operator with others."""
    name = function._schema.name
    return name in (*PRODUCTS, *SCATTERS) or "attention" in name or function.namespace not in ("aten", "prims")


def kernels(function: Any, inputs: Any, result: Any, kind: str) -> list[Kernel]:
    """The kernel of an operator, in a list; none of one that works on numbers of the host."""
    name = function._schema.name
    read, written = _tensors(inputs), _tensors(result)
    if not any(tensor.dim() for tensor in (*read, *written)):
        return []
    if name == "aten::_fused_adamw_":
        weights, gradients, *moments = inputs[0][:4]
        read, written = _tensors([weights, gradients, moments]), _tensors([weights, moments])
    size = sum(map(stored_bytes, (*read, *written)))
    if name in PRODUCTS:
        left, right = [tensor for tensor in read if tensor.dim() > 1][-2:]
        return [Kernel("product", size, flops=2 * left.numel() * right.shape[-1], dtype=left.dtype)]
    return [_attention(name, read, size) if "attention" in name else Kernel(kind, size)]


def _attention(name: str, read: list[Tensor], size: float) -> Kernel:
    backward = "backward" in name
    query, key = read[1:3] if backward else read[:2]  # (B, H, T, D) each; of groups the key has fewer heads
    scores = query.numel() / query.shape[-1] * key.shape[-2] / 2  # the causal half
    flops = 4 * scores * query.shape[-1] * (BACKWARD_PRODUCTS if backward else 1)
    return Kernel("attention", size, flops, scores, query.dtype)


def stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, of which an expanded one has fewer than its shape says."""
    elements = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= length if stride else 1
    return elements * tensor.element_size()


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree, each once."""
    return list({id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}.values())
