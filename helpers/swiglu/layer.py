"""The feed-forward layer of LLaMA-like models: a plain module, and one that chooses what backward keeps."""

import functools
import operator
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

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

    @staticmethod
    def replace_in(model: nn.Module, checkpoint_level: int = KEEP_TWO) -> int:
        """Run every SwiGLU MLP in a model, as of transformers' Llama or Qwen3, as this layer; returns how many.

        An MLP stays where it is, with its Linears `gate_proj`, `up_proj` and `down_proj`: the names in the state dict,
        tied weights, hooks and an optimizer's parameters stay, too, and no weight is copied.
        An MLP that computes anything else (a clamp, dropout, biases, another activation) is left as it is, with a
        warning; if there is no other, a ValueError says what it computes. An MLP whose Linears change later (LoRA,
        hooks, quantisation) runs its own forward again, with a warning, until they are plain.
        """
        check_level(checkpoint_level)
        count, left = 0, {}
        for module in model.modules():
            if not isinstance(module, _InPlace):
                if not all(isinstance(getattr(module, name, None), nn.Module) for name in NAMES):
                    continue
                if reason := _difference(module):
                    left[f"{type(module).__name__} {reason}"] = None
                    continue
                module.__class__ = _in_place(type(module))
            module.checkpoint_level = checkpoint_level
            count += 1
        if not count:
            raise ValueError("; ".join([f"{type(model).__name__} has no MLP that computes {FORMULA}", *left]))
        if left:
            warnings.warn(f"left as they are: {'; '.join(left)}", stacklevel=2)
        return count

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


NAMES = ("gate_proj", "up_proj", "down_proj")
FORMULA = "down_proj(silu(gate_proj(x)) * up_proj(x))"


class _InPlace(MemoryOptimizedSwigluMLP):
    """The layer on the Linears of another MLP. That MLP gets a class derived from this one and from its own."""

    mlp_class: type[nn.Module]
    W = property(lambda self: self.gate_proj.weight.t())
    V = property(lambda self: self.up_proj.weight.t())
    U = property(lambda self: self.down_proj.weight.t())

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*inputs, *named.values())  # each MLP has its own name for its only input
        if all(_is_plain(getattr(self, name)) for name in NAMES):
            return super().forward(x)
        _warn_of_own_forward(self.mlp_class.__name__)
        return self.mlp_class.forward(self, x)

    def __reduce_ex__(self, protocol):  # copies and pickles: classes made at run time aren't found by name
        return _new, (self.mlp_class,), self.__dict__


@functools.cache
def _in_place(mlp_class: type[nn.Module]) -> type[_InPlace]:
    return type(f"MemoryOptimized{mlp_class.__name__}", (_InPlace, mlp_class), {"mlp_class": mlp_class})


def _warn_of_own_forward(name: str) -> None:
    warnings.warn(
        f"{name} has Linears that were changed or have hooks: it runs its own forward, which saves more for backward",
        stacklevel=3,
    )


# As by torch.compiler.assume_constant_result, without importing the compiler: it warns while it is compiled.
_warn_of_own_forward._dynamo_marked_constant = True


def _new(mlp_class: type[nn.Module]) -> _InPlace:
    new_class = _in_place(mlp_class)
    return new_class.__new__(new_class)


def _is_plain(linear: nn.Module) -> bool:
    """Whether a call of it is x @ weight.t(), and nothing else."""
    return type(linear) is nn.Linear and linear.bias is None and not _is_hooked(linear)


def _is_hooked(module: nn.Module) -> bool:
    """Whether something runs besides the class's forward, which the layer would pass by."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__


def _difference(mlp: nn.Module) -> str:
    """What an MLP does that the layer doesn't, in training or in evaluation; "" if it computes `FORMULA` exactly."""
    linears = [getattr(mlp, name) for name in NAMES]
    if "forward" in mlp.__dict__ or any(_is_hooked(module) for module in list(mlp.modules())[1:]):
        return "has hooks inside, or a forward that was replaced"
    if not all(_is_plain(linear) for linear in linears):
        return "has projections that aren't plain Linears without biases"
    modes = {module: module.training for module in mlp.modules()}
    try:
        for training in (True, False):
            for module in modes:
                module.training = training
            if (formula := _formula(mlp)) != FORMULA:
                return f"computes {formula}"
    except Exception as error:  # whatever a forward raises that is given a stand-in for a tensor
        return f"can't be traced ({type(error).__name__})"
    finally:
        for module, training in modes.items():
            module.training = training
    return ""


def _formula(mlp: nn.Module) -> str:
    """What a module's forward computes, by tracing it without data, so that nothing depends on sizes or values.

    Several results are joined by ";": one that nobody uses may have changed a tensor in place.
    """
    graph = fx.Tracer().trace(mlp)
    formulas: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        inputs = [formulas[value] for value in node.all_input_nodes]
        module = mlp.get_submodule(node.target) if node.op == "call_module" else None
        if node.op == "placeholder":
            formulas[node] = "x" if not formulas else node.name
        elif node.target is F.silu or type(module) is nn.SiLU:
            formulas[node] = f"silu({inputs[0]})"
        elif node.target in (operator.mul, torch.mul) and len(inputs) == 2:
            formulas[node] = " * ".join(sorted(inputs))
        else:
            formulas[node] = f"{getattr(node.target, '__name__', node.target)}({', '.join(inputs)})"
    (result,) = graph.output_node().args
    unused = [formula for node, formula in formulas.items() if not node.users]
    return "; ".join([*unused, formulas[result] if isinstance(result, fx.Node) else "several results"])
