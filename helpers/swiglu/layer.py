"""The feed-forward layer of LLaMA-like models: a plain module, and one that chooses what backward keeps."""

import torch
from torch import Tensor, nn

from ..lab.arguments import check_at_least
from .function import MemoryOptimizedSwigluMLPFunction, check_level, plain
from .steps import KEEP_INPUT, KEEP_TWO


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
    initialised as those are. Levels share one state dict, and `layer.checkpoint_level = 2` changes the level; the
    default keeps half of what a plain module keeps, at no more products. Exported programs, ONNX and compiled graphs
    without gradients consist of torch's own operations.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, checkpoint_level: int = KEEP_TWO, *, device=None, dtype=None
    ) -> None:
        super().__init__()
        check_at_least(1, hidden_size=hidden_size, intermediate_size=intermediate_size)
        options = {"device": device, "dtype": dtype}
        self.W = nn.Parameter(torch.empty(hidden_size, intermediate_size, **options))
        self.V = nn.Parameter(torch.empty(hidden_size, intermediate_size, **options))
        self.U = nn.Parameter(torch.empty(intermediate_size, hidden_size, **options))
        self.checkpoint_level = checkpoint_level
        self.reset_parameters()

    @classmethod
    def from_plain(cls, plain: nn.Module, checkpoint_level: int = KEEP_TWO) -> "MemoryOptimizedSwigluMLP":
        """A layer with copies of the weights of a module with Linears `W`, `V`, `U`."""
        return cls.from_linears(plain.W, plain.V, plain.U, checkpoint_level)

    @classmethod
    def from_linears(
        cls, gate: nn.Linear, up: nn.Linear, down: nn.Linear, checkpoint_level: int = KEEP_TWO
    ) -> "MemoryOptimizedSwigluMLP":
        """A layer with copies of the weights of three Linears without biases, as W, V and U."""
        linears = {"W": gate, "V": up, "U": down}
        if any(linear.bias is not None for linear in linears.values()):
            raise ValueError("one of the Linears has a bias; the layer has none")
        layer = cls(gate.in_features, gate.out_features, checkpoint_level, device="meta")
        for name, linear in linears.items():
            copy = linear.weight.detach().t().clone(memory_format=torch.contiguous_format)
            setattr(layer, name, nn.Parameter(copy, requires_grad=linear.weight.requires_grad))
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
        torchs_own = self._is_plain(x) if torch.compiler.is_compiling() else torch.jit.is_tracing()
        if torchs_own:
            return plain(x, self.W, self.V, self.U)
        level = self.checkpoint_level if torch.is_grad_enabled() else KEEP_INPUT
        return MemoryOptimizedSwigluMLPFunction.apply(x, self.W, self.V, self.U, level)

    def _is_plain(self, x: Tensor) -> bool:
        """Whether a graph takes torch's own operations: one that is exported, or that has no backward."""
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in (x, self.W, self.V, self.U))
        return torch.compiler.is_exporting() or not learns

    def extra_repr(self) -> str:
        hidden, intermediate = self.W.shape
        return f"{hidden}, {intermediate}, checkpoint_level={self.checkpoint_level}"
