"""The feed-forward layer of LLaMA-like models: a plain module, and one that chooses what backward keeps."""

import numbers

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.lab.arguments import check_positive
from helpers.lab.precision import autocast_dtype, without_autocast
from helpers.lab.timing import relative_error

from . import steps
from .operators import opaque_backward, opaque_forward
from .steps import KEEP_INPUT, KEEP_TWO, LEVELS


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
        check_positive(hidden_size=hidden_size, intermediate_size=intermediate_size)
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

    def to_linears(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """Three Linears (gate, up, down) with copies of W, V and U."""
        linears = []
        for weight in (self.W, self.V, self.U):
            linear = nn.Linear(*weight.shape, bias=False, device="meta")
            copy = weight.detach().t().clone(memory_format=torch.contiguous_format)
            linear.weight = nn.Parameter(copy, requires_grad=weight.requires_grad)
            linears.append(linear)
        return tuple(linears)

    @classmethod
    def replace_in(cls, model: nn.Module, checkpoint_level: int = KEEP_TWO) -> int:
        """Replace every SwiGLU MLP inside a model, as of transformers' Llama, Mistral or Qwen2; returns how many.

        That is a module with Linears `gate_proj`, `up_proj` and `down_proj` that returns what the layer does for random
        input. Call it before the optimizer is built: parameters are new, and named W, V, U in the state dict. Weights
        are copied, one MLP at a time.
        """
        places: dict[nn.Module, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            if path and _gate_up_down(module):
                places.setdefault(module, []).append(path)
        del module  # so that each MLP is freed when it is replaced
        count = 0
        while places:
            module, paths = places.popitem()
            layer = cls._in_place_of(module, checkpoint_level)
            count += layer is not None
            for path in paths if layer is not None else ():
                model.set_submodule(path, layer)
        if not count:
            raise ValueError(f"{type(model).__name__} has no SwiGLU MLP of gate_proj, up_proj and down_proj inside")
        return count

    @classmethod
    def _in_place_of(cls, module: nn.Module, checkpoint_level: int) -> "MemoryOptimizedSwigluMLP | None":
        """The layer that computes what the module does; None if it doesn't."""
        linears = _gate_up_down(module)
        layer, gate = cls.from_linears(*linears, checkpoint_level), linears[0].weight
        generator = torch.Generator(gate.device).manual_seed(0)
        x = torch.randn(1, 8, gate.shape[1], generator=generator, device=gate.device, dtype=gate.dtype)
        with torch.no_grad():
            x = x * (2 / linears[0](x).std())  # where activations differ from each other
            y = module(x)
            tolerance = 1e-3 if gate.dtype.itemsize >= 4 else 3e-2
            same = isinstance(y, Tensor) and y.shape == x.shape and relative_error(layer(x), y) <= tolerance
        return layer.train(module.training) if same else None

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
        if torch.jit.is_tracing() or (torch.compiler.is_compiling() and self._is_plain(x)):
            return (F.silu(x @ self.W) * (x @ self.V)) @ self.U
        level = self.checkpoint_level if torch.is_grad_enabled() else KEEP_INPUT
        return MemoryOptimizedSwigluMLPFunction.apply(x, self.W, self.V, self.U, level)

    def _is_plain(self, x: Tensor) -> bool:
        """Whether a graph takes torch's own operations: one that is exported, or that has no backward."""
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in (x, self.W, self.V, self.U))
        return torch.compiler.is_exporting() or not learns

    def extra_repr(self) -> str:
        hidden, intermediate = self.W.shape
        return f"{hidden}, {intermediate}, checkpoint_level={self.checkpoint_level}"


class MemoryOptimizedSwigluMLPFunction(torch.autograd.Function):
    """SwiGLU, (SiLU(xW) ⊙ xV) U, with a choice of what is kept for backward.

    Bytes kept a token, with d = hidden, I = intermediate size and b = bytes an element, and the matrix
    products of forward + backward; a plain module keeps (4I + d) b and needs 3 + 6:

        level 0   (3I + d) b          3 + 6
        level 1   d b                 3 + 8
        level 2   (2I + d) b          3 + 6
        level 3   2I (1 + 4/128) + d b    3 + 6, gradients from activations rounded to 8 bits

    Under autocast the products run in autocast's type; the weights are kept as they are and cast again in
    backward, which costs one pass over them and saves a copy. On a GPU, backward writes gradients over what was kept
    unless the graph is retained: tensors taken from `saved_tensors` or from a pack hook don't outlive it. Batched
    gradients (`is_grads_batched`, `vmap` of `grad`) take more memory. Double backward and other transforms of
    torch.func aren't supported.
    """

    @staticmethod
    def forward(ctx, x: Tensor, W: Tensor, V: Tensor, U: Tensor, checkpoint_level: int = KEEP_TWO) -> Tensor:
        level = check_level(checkpoint_level)
        asked = autocast_dtype(x) if isinstance(x, Tensor) else None
        check_arguments(x, W, V, U, casting=asked is not None)
        dtype = asked or x.dtype
        needs = list(ctx.needs_input_grad[:4])
        if not any(needs):
            level = KEEP_INPUT  # nothing has to be kept
        x_cast = _cast(x, dtype)
        with without_autocast(x):
            y, *kept = _forward(x_cast, _cast(W, dtype), _cast(V, dtype), _cast(U, dtype), level)
        need_x, need_W, need_V, _ = needs
        again = level == KEEP_INPUT and any(needs)
        ctx.save_for_backward(
            x_cast if need_W or need_V or again else None,
            W if need_x or again else None,
            V if need_x or again else None,
            U if need_x or need_W or need_V else None,
            *kept,
        )
        ctx.level, ctx.dtype, ctx.dtypes = level, dtype, (x.dtype, W.dtype, V.dtype, U.dtype)
        ctx.x_shape, ctx.intermediate = x.shape, W.shape[1]
        return y

    @staticmethod
    def backward(ctx, l: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        create_graph = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        x, *weights = [_cast(tensor, ctx.dtype) for tensor in saved[:4]]
        needs = list(ctx.needs_input_grad[:4])
        with torch.no_grad(), without_autocast(l):
            arguments = (_cast(l, ctx.dtype), x, *weights, list(saved[4:]), ctx.level, needs)
            grads = _backward(*arguments, x_shape=ctx.x_shape, intermediate=ctx.intermediate)
        grads = [_cast(grad, dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)]
        if create_graph:
            grads = _refuse_second_derivative(grads, [l, *saved[:4]])
        return *grads, None


def _forward(x: Tensor, W: Tensor, V: Tensor, U: Tensor, level: int) -> list[Tensor]:
    if torch.compiler.is_compiling():
        return opaque_forward(x, W, V, U, level)
    y, kept = steps.forward(x, W, V, U, level)
    return [y, *kept]


def _backward(l, x, W, V, U, kept, level, needs, *, x_shape, intermediate) -> list[Tensor | None]:
    if torch.compiler.is_compiling():
        found = opaque_backward(l, x, W, V, U, kept, level, needs, list(x_shape), intermediate)
        remaining = iter(found)
        return [next(remaining) if needed else None for needed in needs]
    return steps.backward(l, x, W, V, U, kept, level, needs, x_shape, overwrite=not _graph_is_retained())


def _graph_is_retained() -> bool:
    """Whether backward may come again (`retain_graph=True`) and needs what was kept as it was."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if asked is None else asked()


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """`tensor.to(dtype)`, without the call where there is nothing to do: the layer is often bound by Python."""
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)


class _RefuseSecondDerivative(torch.autograd.Function):
    """Passes gradients through; differentiating them again says that it isn't supported."""

    @staticmethod
    def forward(ctx, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx, *grads: Tensor) -> None:
        raise RuntimeError("MemoryOptimizedSwigluMLP: double backward isn't supported; use SwigluMLP for it")


def _refuse_second_derivative(grads: list[Tensor | None], roots: list[Tensor | None]) -> list[Tensor | None]:
    """Hang the gradients on the tensors they depend on, by a node that refuses."""
    present = [grad for grad in grads if grad is not None]
    guarded = iter(_RefuseSecondDerivative.apply(len(present), *present, *(r for r in roots if r is not None)))
    return [None if grad is None else next(guarded) for grad in grads]


def _gate_up_down(module: nn.Module) -> list[nn.Linear]:
    """The three Linears without biases of an MLP; empty if it isn't one."""
    linears = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
    return linears if all(type(linear) is nn.Linear and linear.bias is None for linear in linears) else []


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_level(level: int) -> int:
    """The level as an int, if there is such a one."""
    if type(level) is int and level in LEVELS:
        return level
    if not isinstance(level, numbers.Integral) or isinstance(level, bool) or int(level) not in LEVELS:
        allowed = "; ".join(f"{n} keeps {kept}" for n, kept in LEVELS.items())
        raise ValueError(f"checkpoint_level is {level!r}; allowed: {allowed}")
    return int(level)


def check_arguments(x: Tensor, W: Tensor, V: Tensor, U: Tensor, *, casting: bool) -> None:
    """Raise a `ValueError` that names what was given and what is allowed. `casting`: autocast makes dtypes agree."""
    for name, given in {"x": x, "W": W, "V": V, "U": U}.items():
        if not isinstance(given, Tensor):
            raise ValueError(f"{name} is a {type(given).__name__}; it must be a tensor")
    if W.ndim != 2 or V.shape != W.shape or U.shape != W.shape[::-1]:
        shapes = f"W {tuple(W.shape)}, V {tuple(V.shape)}, U {tuple(U.shape)}"
        raise ValueError(f"shapes of {shapes}; W and V must be (hidden, intermediate), U (intermediate, hidden)")
    if x.ndim == 0 or x.shape[-1] != W.shape[0]:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last dimension must be the hidden size, {W.shape[0]}")
    if x.dtype in DTYPES and all(w.dtype == x.dtype and w.device == x.device for w in (W, V, U)):
        return
    named = {"x": x, "W": W, "V": V, "U": U}
    devices = {name: tensor.device for name, tensor in named.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"mixed devices: {_listed(devices)}; x and the weights must be on one device")
    dtypes = {name: tensor.dtype for name, tensor in named.items()}
    if not set(dtypes.values()) <= set(DTYPES):
        raise ValueError(f"dtypes {_listed(dtypes)}; allowed: {', '.join(map(str, DTYPES))}")
    if not casting:
        raise ValueError(
            f"mixed dtypes: {_listed(dtypes)}; they must be one dtype, or use torch.autocast (which leaves fp64 alone)"
        )


def _listed(named: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in named.items())
