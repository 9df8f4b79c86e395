"""`Setup`: all training options of the chapter, checked before anything is allocated. `LADDER` and `CPU_LADDER`: setups
step by step, each one change from its baseline."""

import dataclasses
import itertools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..lab.arguments import check_at_least, check_choice
from ..lab.ceilings import medium_is_fp32
from ..lab.cpu import ALLOCATORS
from ..lab.machine import missing_because
from ..models.llama import PRESETS

# field -> valid values
CHOICES = {
    "model": tuple(PRESETS),
    # fp32, fp32-onednn (on a CPU, by that library) and tf32: how products of fp32 numbers are computed. amp-bf16:
    # weights, gradients and optimizer in fp32, products and attention in bf16. amp-fp16: the same in fp16, with our
    # dynamic loss scale. bf16: weights and gradients in bf16, without an fp32 copy; torch's optimizers then lose
    # updates below half a unit in the last place, the 8-bit one rounds stochastically, which is exact on average.
    "precision": ("fp32", "fp32-onednn", "tf32", "amp-bf16", "amp-fp16", "bf16"),
    "residual": ("weights", "bf16"),  # the type of the residual stream: that of the weights, or bf16
    "attention": ("eager", "math", "flash", "cudnn", "blocked"),  # blocked: ours, for CPUs
    "norm": ("eager", "torch", "triton", "triton residual"),  # residual: with the sum before a block's second norm
    "mlp": ("plain", "level 0", "level 1", "level 2", "level 3"),  # levels: helpers.swiglu's
    "head": ("full", "chunked", "torch"),  # torch: F.linear_cross_entropy in chunks
    "optimizer": ("for-loop", "foreach", "fused", "in backward", "8-bit"),  # see `optimizers`
    # regional: a block's code is compiled once for all blocks, in a fraction of the time
    "compile": ("none", "default", "regional", "max-autotune", "regional max-autotune"),
    "allocator": tuple(ALLOCATORS),  # glibc's; see `environment`
    "float8": ("none", "tensorwise", "rowwise"),  # torchao's, with one scale a tensor, or a row; emulated on a CPU
    "checkpointing": ("none", "full", "selective", "memory budget"),
}

# precision -> torch's name of how fp32 products are computed; of the others, those that remain in fp32
FP32_PRODUCTS = {"fp32": "highest", "fp32-onednn": "medium"}
AUTOCAST = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}  # precision -> the type of products

# Requirements of values, for `lab.machine.missing_because`: on any device, and on a device type. Others have none.
NEEDS: dict[str, dict[tuple[str, Any], tuple[str, ...]]] = {
    "any": {
        ("precision", "tf32"): ("CUDA", "compute capability 8.0"),
        ("attention", "cudnn"): ("CUDA", "compute capability 8.0"),
        **{("norm", norm): ("CUDA", "triton") for norm in ("triton", "triton residual")},
        ("cuda_graph", True): ("CUDA",),
        ("optimizer", "8-bit"): ("torchao",),
    },
    "cpu": {
        ("attention", "flash"): ("torch 2.9",),  # with heads that share keys
        **{("compile", mode): ("C++ compiler",) for mode in CHOICES["compile"][1:]},
        ("optimizer", "8-bit"): ("C++ compiler",),  # torchao compiles its update
        **{("float8", recipe): ("torchao",) for recipe in CHOICES["float8"][1:]},
    },
    "cuda": {
        **{("compile", mode): ("triton",) for mode in CHOICES["compile"][1:]},
        ("precision", "amp-bf16"): ("compute capability 8.0",),
        ("precision", "bf16"): ("compute capability 8.0",),
        ("attention", "flash"): ("compute capability 8.0",),
        ("optimizer", "8-bit"): ("triton",),
        ("float8", "tensorwise"): ("compute capability 8.9", "torchao"),
        ("float8", "rowwise"): ("compute capability 9.0", "torchao"),
    },
}

# Fallbacks for values that a machine doesn't support: field -> value -> the next best value.
NEXT_BEST: dict[str, dict[Any, Any]] = {
    "precision": {"fp32-onednn": "fp32", "tf32": "fp32", "amp-bf16": "amp-fp16", "bf16": "fp32"},
    "attention": {"cudnn": "flash", "flash": "math"},
    "norm": {"triton": "torch", "triton residual": "torch"},
    "head": {"torch": "chunked"},
    "optimizer": {"8-bit": "fused"},
    "compile": {"regional max-autotune": "regional", "regional": "none", "max-autotune": "default", "default": "none"},
    "cuda_graph": {True: False},
    "float8": {"tensorwise": "none", "rowwise": "none"},
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How to train a Llama on one GPU or CPU. The defaults are no optimisation at all.

    Contradictory options raise a `ValueError` here; `missing_because` gives the reason why a device can't run a setup.
    """

    model: str = "llama-3.2-1b"
    layers: int | None = None  # of the model; None: all
    precision: str = "fp32"
    residual: str = "weights"
    attention: str = "eager"
    norm: str = "eager"
    mlp: str = "plain"
    fused: bool = False  # q, k, v in one product, and (in a plain mlp) gate and up in another
    head: str = "full"
    logits_gib: int = 1  # of a chunk of a chunked head
    optimizer: str = "for-loop"
    compile: str = "none"
    allocator: str = "default"  # of the host; it needs a process that is started with `environment`
    cuda_graph: bool = False  # the full step, from the tokens to the new weights, is one launch
    float8: str = "none"  # for the blocks' products; the head's isn't changed
    checkpointing: str = "none"
    batch: int = 1
    sequence: int = 2048
    learning_rate: float = 3e-4
    seed: int = 0

    def __post_init__(self) -> None:
        for name, valid in CHOICES.items():
            check_choice(valid, **{name: getattr(self, name)})
        check_at_least(1, batch=self.batch, sequence=self.sequence, logits_gib=self.logits_gib)
        check_at_least(1, layers=1 if self.layers is None else self.layers)
        longest = PRESETS[self.model].get("max_length", 131072)
        if self.sequence > longest:
            raise ValueError(f"sequence is {self.sequence}; {self.model} has positions for {longest}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be above 0")
        if contradiction := self._contradiction():
            raise ValueError(contradiction)

    def _contradiction(self) -> str:
        if self.checkpointing == "memory budget" and self.compile == "none":
            return "checkpointing is 'memory budget', which is the compiler's to keep; compile must not be 'none'"
        if self.checkpointing == "selective" and self.mlp != "plain":
            return f"checkpointing is 'selective' and mlp is {self.mlp!r}: both choose what the mlp keeps; take one"
        if self.cuda_graph and self.precision == "amp-fp16" and self.optimizer != "fused":
            return "cuda_graph is True and precision 'amp-fp16': only optimizer 'fused' skips a step without the host"
        if self.optimizer == "in backward" and self.precision == "amp-fp16":
            return "optimizer is 'in backward' and precision 'amp-fp16', whose scale needs all gradients before a step"
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

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process must start so that its allocator is the setup's (`in_fresh_process`)."""
        return ALLOCATORS[self.allocator]

    def differs(self, other: "Setup") -> dict[str, Any]:
        """The fields in which this setup differs from another, with this setup's values."""
        pairs = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in pairs if value != getattr(other, name)}

    def missing_because(self, device: torch.device) -> str:
        """Why this setup can't run on a device, as one line; "" if it can."""
        return next(iter(self.missing(device).values()), "")

    def missing(self, device: torch.device) -> dict[str, str]:
        """Fields that the device or the installation doesn't support -> the reason."""
        reasons = {}
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            needs = (need for kind in ("any", device.type) for need in NEEDS[kind].get((name, value), ()))
            if reason := missing_because(*needs, device=device):
                reasons[name] = f"{name} {value!r}: {reason}"
        if self.precision == "fp32-onednn" and not (device.type == "cpu" and medium_is_fp32()):
            reasons["precision"] = "precision 'fp32-onednn': oneDNN has no other kernel of fp32 products here"
        if self.head == "torch" and not hasattr(F, "linear_cross_entropy"):
            reasons["head"] = f"F.linear_cross_entropy isn't in torch {torch.__version__}"
        if device.type == "cuda" and self.attention in ("flash", "cudnn") and self.precision in ("fp32", "tf32"):
            given = f"attention {self.attention!r} has no {self.precision} kernel on a GPU"
            reasons["attention"] = f"{given}; it needs 'amp-bf16', 'amp-fp16' or 'bf16'"
        return reasons

    def possible(self, device: torch.device) -> "Setup":
        """The nearest setup that the device can run: unsupported values become their `NEXT_BEST`."""
        setup = self
        while missing := setup.missing(device):
            name = next(iter(missing))
            changes = {name: NEXT_BEST[name][getattr(setup, name)]}
            if "precision" in changes:
                changes |= {"float8": "none", "residual": "weights"}
            if changes.get("precision") == "amp-fp16" and setup.optimizer == "in backward":
                changes["optimizer"] = "fused"
            elif changes.get("precision") == "amp-fp16" and setup.optimizer != "fused":
                changes["cuda_graph"] = False
            if changes.get("compile") == "none" and setup.checkpointing == "memory budget":
                changes["checkpointing"] = "full"
            setup = dataclasses.replace(setup, **changes)
        return setup


START = "no optimisation"

CHANGES = "changes what is computed"  # why a step is left
_RUNGS = tomllib.loads(Path(__file__).with_name("ladder.toml").read_text(encoding="utf-8"))
# Device type -> step -> what it changes, in order; and the steps that are left, with the reason
LADDERS: dict[str, tuple[dict[str, dict[str, Any]], dict[str, str]]] = {
    kind: (
        {name: {field: value for field, value in rung.items() if field != "left"} for name, rung in rungs.items()},
        {name: rung["left"] for name, rung in rungs.items() if "left" in rung},
    )
    for kind, rungs in _RUNGS.items()
}
PLAIN: dict[str, dict[str, Any]] = {"cuda": {}, "cpu": {"allocator": "kept"}}  # what the first rung has there


def stands_on(name: str, kind: str = "cuda") -> str:
    """The baseline of a step, which it is one change from: the last step before it that isn't left."""
    steps, left = LADDERS[kind]
    check_choice(steps, step=name)
    before = itertools.takewhile(lambda step: step != name, steps)
    return [START, *(step for step in before if step not in left)][-1]


def climb(start: Setup, kind: str = "cuda") -> dict[str, Setup]:
    """A device type's ladder by name, from another start: another model, sequence or batch."""
    setups = {START: dataclasses.replace(start, **PLAIN[kind])}
    for name, change in LADDERS[kind][0].items():
        setups[name] = dataclasses.replace(setups[stands_on(name, kind)], **change)
    return setups


def rung(step: str, start: Setup, device: torch.device) -> Setup:
    """A step of the device's ladder from another start; where bf16 would be emulated, mixed precision is in fp16.

    On such a GPU, which lacks more, values that the step inherits are the next best. What the step itself changes
    stays, and `missing_because` says why it can't run; so does a step that needs bf16. A `ValueError`, one line, for a
    step of another device's ladder.
    """
    setups = climb(start, device.type)
    if step not in setups:
        raise ValueError(f"no step of the ladder on {device.type}")
    setup = setups[step]
    if not missing_because("native bf16", device=device) or step == START:
        return setup
    own = setup.differs(setups[stands_on(step, device.type)])
    in_bf16 = own.get("precision") == "bf16" or "bf16" in str(own.get("residual"))
    in_bf16 = in_bf16 or own.get("optimizer") == "in backward"  # which a loss scale contradicts
    lacking = (own.keys() & setup.missing(device).keys()) - {"precision"}
    return setup if in_bf16 or lacking or own.get("precision") == "tf32" else setup.possible(device)


LADDER: dict[str, Setup] = climb(Setup())
CPU_LADDER: dict[str, Setup] = climb(Setup(model="llama-60m", sequence=1024), "cpu")
