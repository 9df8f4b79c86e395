"""The feed-forward layer of LLaMA-like models: a plain module, and one that chooses what backward keeps."""

import torch
from torch import Tensor, nn

from .function import MemoryOptimizedSwigluMLPFunction
from .levels import KEEP_INPUT, check_level


class SwigluMLP(nn.Module):
    """(SiLU(xW) ⊙ xV) U as autograd sees it by itself: the reference, which keeps x and four tensors of xW's size."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, device=None, dtype=None) -> None:
        super().__init__()
        options = {"bias": False, "device": device, "dtype": dtype}
        self.W = nn.Linear(hidden_size, intermediate_size, **options)
        self.V = nn.Linear(hidden_size, intermediate_size, **options)
        self.U = nn.Linear(intermediate_size, hidden_size, **options)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.U(self.act_fn(self.W(x)) * self.V(x))


class MemoryOptimizedSwigluMLP(nn.Module):
    """The same layer by `MemoryOptimizedSwigluMLPFunction`, which tells what each `checkpoint_level` costs.

    W and V are (hidden, intermediate), U is (intermediate, hidden): the transposes of a Linear's weights,
    initialised as those are. Levels share one state dict, and `layer.checkpoint_level = 2` changes the level.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, checkpoint_level: int, *, device=None, dtype=None
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} is {size!r}; it must be an integer of at least 1")
        options = {"device": device, "dtype": dtype}
        self.W = nn.Parameter(torch.empty(hidden_size, intermediate_size, **options))
        self.V = nn.Parameter(torch.empty(hidden_size, intermediate_size, **options))
        self.U = nn.Parameter(torch.empty(intermediate_size, hidden_size, **options))
        self.checkpoint_level = checkpoint_level
        self.reset_parameters()

    @classmethod
    def from_plain(cls, plain: nn.Module, checkpoint_level: int) -> "MemoryOptimizedSwigluMLP":
        """A layer with copies of the weights of a module with Linears `W`, `V`, `U`."""
        layer = cls(plain.W.in_features, plain.W.out_features, checkpoint_level, device="meta")
        for name in "WVU":
            weight = getattr(plain, name).weight
            copy = weight.detach().t().clone(memory_format=torch.contiguous_format)
            setattr(layer, name, nn.Parameter(copy, requires_grad=weight.requires_grad))
        return layer

    @property
    def checkpoint_level(self) -> int:
        return self._checkpoint_level

    @checkpoint_level.setter
    def checkpoint_level(self, level: int) -> None:
        self._checkpoint_level = check_level(level)

    def reset_parameters(self) -> None:
        """What nn.Linear does: uniform in ±1/√(fan in)."""
        for weight in (self.W, self.V, self.U):
            nn.init.uniform_(weight, -(weight.shape[0] ** -0.5), weight.shape[0] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        level = self.checkpoint_level if torch.is_grad_enabled() else KEEP_INPUT
        return MemoryOptimizedSwigluMLPFunction.apply(x, self.W, self.V, self.U, level)

    def extra_repr(self) -> str:
        hidden, intermediate = self.W.shape
        return f"{hidden}, {intermediate}, checkpoint_level={self.checkpoint_level}"
