"""What fills a GPU's memory when a script ends out of it, and what would make room.

Nothing is recorded while the script runs. What is alive when it ends is found among Python's objects, as long as the
error keeps its frames: weights, their gradients, an optimizer's state, other tensors. What torch's allocator has given
out beyond that, autograd keeps for the backward pass.
"""

import contextlib
import gc
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .stacks import is_library, quoted

WEIGHTS, GRADIENTS, STATE, HELD = "weights", "gradients", "optimizer's state", "other tensors"
SAVED, UNUSED = "kept for the backward pass", "reserved in pieces, unused"
ASKED = re.compile(r"Tried to allocate ([\d.]+) (\w)iB")
SIZES = {"K": 2**10, "M": 2**20, "G": 2**30}
GIB = SIZES["G"]


@dataclass(frozen=True)
class Filled:
    """The bytes that were asked for and those of each part; the place; the tensors that take most, in words."""

    asked: int
    capacity: int
    where: str
    parts: dict[str, int]
    largest: str = ""

    @property
    def advice(self) -> Iterator[str]:
        """What would make room, the cheapest first."""
        samples = self.parts[SAVED] + self.parts[HELD]
        short = max(self.asked - self.parts[UNUSED], 0)
        if self.parts[UNUSED] >= self.asked:
            yield "PYTORCH_ALLOC_CONF=expandable_segments:True joins the unused pieces, which would be enough"
        elif samples > short:
            share = 1 - short / samples
            yield f"a batch of at most {share:.0%} of the samples gets past this line; accumulate the rest"
        if self.parts[SAVED] > self.parts[WEIGHTS]:
            yield "bf16 autocast halves most of what is kept for the backward pass, checkpointing keeps a block's input"
        if self.parts[GRADIENTS] and not self.parts[STATE]:
            yield "the optimizer's state isn't there yet: AdamW's takes twice the bytes of the weights"
        yield "`dlspeed fit` counts what each of these changes needs, before it runs"

    def text(self) -> list[str]:
        asked, capacity = self.asked / GIB, self.capacity / GIB
        lines = [f"out of memory at {self.where}: {asked:.3g} GiB were asked for, the device has {capacity:.3g} GiB"]
        lines += [f"  {part:<28}{size / GIB:8.2f} GiB" for part, size in self.parts.items() if size]
        lines += [f"most of the {HELD}: {self.largest}"] if self.largest else []
        return lines + [f" → {change}" for change in self.advice]


def filled(error: BaseException) -> Filled:
    """What fills the current device, while the error keeps the script's frames alive."""
    objects = gc.get_objects()
    weights = [each for each in objects if issubclass(type(each), nn.Parameter)]
    states = [each.state.values() for each in objects if issubclass(type(each), Optimizer)]
    state = [tensor for of in states for each in of for tensor in each.values()]
    tensors = [each for each in objects if issubclass(type(each), Tensor)]
    seen: set[int] = set()
    kinds = {WEIGHTS: weights, GRADIENTS: [weight.grad for weight in weights], STATE: state}
    parts = {part: sum(size for size, _ in _new(of, seen)) for part, of in kinds.items()}
    others = list(_new(tensors, seen))
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    parts[HELD] = sum(size for size, _ in others)
    parts |= {SAVED: max(allocated - sum(parts.values()), 0), UNUSED: reserved - allocated}
    asked = ASKED.search(str(error))
    size = round(float(asked[1]) * SIZES[asked[2]]) if asked else 0
    capacity = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return Filled(size, capacity, _place(error), parts, _largest(others))


def _new(tensors: Iterable[Any], seen: set[int]) -> Iterator[tuple[int, str]]:
    """Bytes and shape of each tensor on a GPU whose storage wasn't seen before."""
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):  # sparse, or no tensor
            if not tensor.is_cuda:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                dtype = str(tensor.dtype).removeprefix("torch.")
                yield storage.nbytes(), f"{tuple(tensor.shape)} {dtype}"


def _largest(tensors: list[tuple[int, str]]) -> str:
    """The shape whose tensors take most together."""
    together: Counter[str] = Counter()
    for size, shape in tensors:
        together[shape] += size
    if not together:
        return ""
    ((shape, size),) = together.most_common(1)
    count = sum(each == shape for _, each in tensors)
    return f"{count} of {shape}, {size / GIB:.2f} GiB"


def _place(error: BaseException) -> str:
    """The innermost line of the user's that the error passed."""
    at, trace = ("", 0), error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        at = at if is_library(file) else (file, trace.tb_lineno)
        trace = trace.tb_next
    return quoted(*at)
