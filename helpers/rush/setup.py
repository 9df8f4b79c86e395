"""`Setup`: everything that the optimization rush varies, checked before anything is allocated."""

import dataclasses
import shutil
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from helpers.lab.arguments import check_positive
from helpers.lab.machine import NOT_INSTALLED, installed
from helpers.models.llama import PRESETS

# field -> what it may be
CHOICES = {
    "model": tuple(PRESETS),
    # fp32 and tf32: how products of fp32 numbers are computed. amp-bf16: weights, gradients and optimizer in fp32,
    # products and attention in bf16. bf16: weights and gradients are bf16 and there is no fp32 copy of them; torch's
    # optimizers then lose updates below half a unit in the last place, ours round at random so that none is lost on
    # average.
    "precision": ("fp32", "tf32", "amp-bf16", "bf16"),
    "residual": ("weights", "bf16"),  # the type of the residual stream: that of the weights, or bf16
    "attention": ("eager", "math", "flash", "cudnn"),
    "norm": ("eager", "torch", "triton"),
    "rope": ("eager", "triton"),
    "mlp": ("plain", "level 0", "level 1", "level 2", "level 3"),  # levels: helpers.swiglu's
    "head": ("full", "chunked", "torch", "triton"),  # torch: F.linear_cross_entropy in chunks
    "optimizer": ("for-loop", "foreach", "fused", "triton", "bf16-state", "8-bit"),
    "compile": ("none", "default", "max-autotune"),
    "float8": ("none", "tensorwise", "torchao"),  # tensorwise: ours
    "checkpointing": ("none", "full", "selective", "memory budget"),
}

# What takes a value's place where a machine has no such thing: field -> value -> the next best.
NEXT_BEST: dict[str, dict[Any, Any]] = {
    "precision": {"tf32": "fp32", "amp-bf16": "tf32", "bf16": "fp32"},
    "attention": {"cudnn": "flash", "flash": "math"},
    "norm": {"triton": "torch"},
    "rope": {"triton": "eager"},
    "head": {"torch": "chunked", "triton": "chunked"},
    "optimizer": {"triton": "fused"},
    "compile": {"max-autotune": "default", "default": "none"},
    "cuda_graph": {True: False},
    "float8": {"torchao": "tensorwise", "tensorwise": "none"},
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to train a Llama on one GPU. The defaults are no optimisation at all.

    A contradiction is a `ValueError`, here; what this machine lacks is told by `obstacle`, and refused by `run`.
    """

    model: str = "llama-3.2-1b"
    precision: str = "fp32"
    residual: str = "weights"
    attention: str = "eager"
    norm: str = "eager"
    rope: str = "eager"
    mlp: str = "plain"
    fused: bool = False  # q, k, v in one product, and (in a plain mlp) gate and up in another
    head: str = "full"
    optimizer: str = "for-loop"
    compile: str = "none"
    cuda_graph: bool = False  # the whole step, from the tokens to the new weights, is one launch
    float8: str = "none"  # the products of the blocks; the head's stays as it is
    checkpointing: str = "none"
    memory_budget: float = 0.5  # of "memory budget": the share of what the compiler would keep that it may keep
    batch: int = 1
    sequence: int = 2048
    learning_rate: float = 3e-4
    clip: float | None = None  # the gradient norm at most; the task's loop has no clipping, so it is off
    seed: int = 0

    def __post_init__(self) -> None:
        for name, valid in CHOICES.items():
            if getattr(self, name) not in valid:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(map(repr, valid))}")
        check_positive(batch=self.batch, sequence=self.sequence)
        longest = PRESETS[self.model].get("max_length", 131072)
        if self.sequence > longest:
            raise ValueError(f"sequence is {self.sequence}; {self.model} has positions for {longest}")
        if not 0 <= self.memory_budget <= 1:
            raise ValueError(f"memory_budget is {self.memory_budget}; it must be from 0 to 1")
        for name in ("learning_rate", "clip"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        contradiction = self._contradiction()
        if contradiction:
            raise ValueError(contradiction)

    def _contradiction(self) -> str:
        if self.checkpointing == "memory budget" and self.compile == "none":
            return "checkpointing is 'memory budget', which is the compiler's to keep; compile must not be 'none'"
        if self.checkpointing == "selective" and self.mlp != "plain":
            return f"checkpointing is 'selective' and mlp is {self.mlp!r}: both choose what the mlp keeps; take one"
        if self.residual == "bf16" and self.precision != "amp-bf16":
            return f"residual is 'bf16' and precision {self.precision!r}; it is for 'amp-bf16', where weights are fp32"
        if self.float8 == "none":
            return ""
        if self.precision not in ("amp-bf16", "bf16"):
            return f"float8 is {self.float8!r} and precision {self.precision!r}; float8 rounds bf16 numbers further"
        if self.mlp != "plain":
            return f"float8 is {self.float8!r} and mlp {self.mlp!r}, whose products are its own; mlp must be 'plain'"
        if self.batch * self.sequence % 16:
            return f"float8 products need a multiple of 16 tokens; batch × sequence is {self.batch * self.sequence}"
        return ""

    def differs(self, other: "Setup") -> dict[str, Any]:
        """The fields in which this setup differs from another, with this one's values."""
        pairs = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in pairs if value != getattr(other, name)}

    def obstacle(self, device: torch.device) -> str:
        """Why this setup can't run on a device, in a line for a table's status; "" if it can."""
        return next(iter(self.obstacles(device).values()), "")

    def obstacles(self, device: torch.device) -> dict[str, str]:
        """Each field that asks for what the device or the installation lacks, with the reason."""
        cuda = device.type == "cuda"
        reasons = {
            "precision": _precision(self.precision, cuda),
            "attention": _attention(self.attention, self.precision, cuda),
            "norm": _triton("norm", self.norm, cuda),
            "rope": _triton("rope", self.rope, cuda),
            "head": _triton("head", self.head, cuda) or _head(self.head),
            "optimizer": _triton("optimizer", self.optimizer, cuda),
            "compile": _compile(self.compile, cuda),
            "cuda_graph": "a CUDA graph needs CUDA" if self.cuda_graph and not cuda else "",
            "float8": _float8(self.float8, device),
        }
        return {name: reason for name, reason in reasons.items() if reason}

    def possible(self, device: torch.device) -> "Setup":
        """The nearest setup that the device can run: what it lacks is replaced by the next best thing."""
        setup = self
        while missing := setup.obstacles(device):
            name = next(iter(missing))
            changes = {name: NEXT_BEST[name][getattr(setup, name)]}
            if changes.get("precision") in ("fp32", "tf32"):
                changes |= {"float8": "none", "residual": "weights"}
            if changes.get("compile") == "none" and setup.checkpointing == "memory budget":
                changes["checkpointing"] = "full"
            setup = dataclasses.replace(setup, **changes)
        return setup


def _precision(precision: str, cuda: bool) -> str:
    if precision == "tf32" and not cuda:
        return "TF32 is a way of NVIDIA's matrix units; it needs CUDA"
    if precision in ("amp-bf16", "bf16") and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"precision {precision!r} needs a GPU with bf16 (compute capability 8.0 or above)"
    return ""


def _attention(attention: str, precision: str, cuda: bool) -> str:
    if attention == "cudnn" and not cuda:
        return "attention 'cudnn' needs CUDA"
    if attention in ("flash", "cudnn") and cuda and precision in ("fp32", "tf32"):
        return f"attention {attention!r} has no {precision} kernel on a GPU; it needs 'amp-bf16' or 'bf16'"
    return ""


def _triton(field: str, value: str, cuda: bool) -> str:
    if value != "triton":
        return ""
    if not cuda:
        return f"{field} 'triton' needs CUDA"
    return "" if installed("triton") else NOT_INSTALLED + "triton"


def _head(head: str) -> str:
    if head == "torch" and not hasattr(F, "linear_cross_entropy"):
        return f"F.linear_cross_entropy isn't in torch {torch.__version__}"
    return ""


def _compile(mode: str, cuda: bool) -> str:
    if mode == "none":
        return ""
    if cuda:
        return "" if installed("triton") else NOT_INSTALLED + "triton"
    if mode == "max-autotune":
        return "compile 'max-autotune' tunes a GPU's kernels; it needs CUDA"
    return "" if any(map(shutil.which, ("g++", "clang++", "c++"))) else "compiling for a CPU needs a C++ compiler"


def _float8(float8: str, device: torch.device) -> str:
    if float8 == "none":
        return ""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "float8 needs a GPU that multiplies it (compute capability 8.9 or above)"
    if float8 == "torchao" and installed("torchao") is None:
        return NOT_INSTALLED + "torchao"
    return ""
