"""A ledger of a training step's memory: the bytes of each part, now and at the peak."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..models import Llama

BLOCK = 512  # bytes: the CUDA allocator's sizes are multiples of it
# The method by which DTensor infers a result's shape, as named in torch 2.11 and 2.13.
INFERS = "_propagate_tensor_meta_non_cached"

AT_REST = ("weights", "optimizer", "tables, tokens")  # allocated between steps, too
FLAT = "weight copies"  # what a flat tensor is, unless it is named: FSDP gathers weights into such tensors
PARTS = (*AT_REST, "weight copies", "gradients", "activations", "logits")
COUNTED_LAYERS = (2, 3)  # beyond, a phase's peak grows by the same bytes with each layer


@dataclass(frozen=True)
class Peak:
    """The peak memory of a step: bytes, whether it is in forward or backward, and the bytes of each part."""

    bytes: int
    moment: str
    parts: dict[str, int]

    @property
    def at_rest(self) -> int:
        """Bytes that stay allocated between steps."""
        return sum(self.parts[part] for part in AT_REST)


class Ledger(TorchDispatchMode):
    """Counts the bytes of all live tensor storages by part, in multiples of `BLOCK`, as the CUDA allocator would.

    Each storage is counted once, from the operation that creates it until it is freed. The cost is some 20 µs an
    operation. Under `FakeTensorMode` nothing is computed or allocated: the 8B model can be counted on a laptop.

    What a storage is follows from what is named (`name`), else from the operation and the shape: a cast of a weight;
    logits end in the vocabulary; gradients have a weight's shape. Where an activation has a weight's shape as well, a
    gradient counts as an activation until it is complete.
    """

    # torch.distributed._tools.MemTracker counts the same to 0.01 %, but in 4 times the time, 8 % too much of tensor
    # parallelism, and without the allocator's blocks where there is no CUDA.

    def __init__(self, tokens: int = 0) -> None:
        super().__init__()
        self.tokens, self.vocab, self.shapes = tokens, 0, set()
        self.bytes, self.parts = 0, dict.fromkeys(PARTS, 0)
        self.peaks: list[Peak] = []  # one for each phase of the step
        self._storages: dict[int, tuple[int, str]] = {}  # bytes and part
        self._resize = torch.UntypedStorage.resize_
        self._infer = getattr(ShardingPropagator, INFERS)
        self._inferring = False
        self.begin_phase(first=True)

    @property
    def peak(self) -> Peak:
        return max(self.peaks, key=_bytes)

    def begin_phase(self, first: bool = False) -> None:
        """Start a phase, whose peak is told apart; the `first` one forgets those before."""
        self.peaks = ([] if first else self.peaks) + [Peak(0, "", {})]
        self._look()

    def learn(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: Iterable[Tensor]) -> None:
        """Name a model's weights, tables, optimizer state, gradients and tokens."""
        weights = list(model.parameters())
        self.shapes, self.vocab = {weight.shape for weight in weights}, weights[0].shape[0]  # the embedding's rows
        self.name("weights", weights)
        self.name("optimizer", tree_leaves([dict(state) for state in optimizer.state.values()]))
        self.name("tables, tokens", [*model.buffers(), *tokens])
        self.name("gradients", [weight.grad for weight in weights])

    def begin_step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: Iterable[Tensor]) -> None:
        """As after a first step, without its cost: with the optimizer's state, and all that stays named."""
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.learn(model, optimizer, tokens)
        self.begin_phase(first=True)

    def name(self, part: str, tensors: Iterable[Any]) -> None:
        """Say which part tensors are."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                key = tensor.untyped_storage()._cdata
                if key in self._storages:
                    self._set(key, self._storages[key][0], part)

    def name_flat(self, part: str) -> None:
        """Say which part the flat tensors are that nobody named."""
        for key, (size, old) in list(self._storages.items()):
            if old == FLAT:
                self._set(key, size, part)

    def __enter__(self) -> "Ledger":
        # FSDP frees gathered parameters by resizing their storage to 0, which `__torch_dispatch__` doesn't see.
        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            self._resize(storage, size)
            if storage._cdata in self._storages:
                self._set(storage._cdata, storage.nbytes(), self._storages[storage._cdata][1])
                self._look()

        # DTensor infers result shapes by running operations on fake tensors of the global shapes; they must not count.
        def infer(*args: Any, **kwargs: Any) -> Any:
            self._inferring = True
            try:
                return self._infer(*args, **kwargs)
            finally:
                self._inferring = False

        torch.UntypedStorage.resize_ = resize_
        setattr(ShardingPropagator, INFERS, infer)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        setattr(ShardingPropagator, INFERS, self._infer)
        super().__exit__(*error)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's wrapper for what may be compiled takes a sixth of the time here."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two calls of three ask for it, and FakeTensorMode takes long to tell
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor dispatch; its operations on local tensors come back here
        if function is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            self._accumulates(args[0])
        result = function(*args, **(kwargs or {}))
        if self._inferring:
            return result
        casts = function is torch.ops.aten._to_copy.default and self.part(args) == "weights"
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf, casts)
        operation = function._schema.name
        if operation == "fsdp::chunk_cat":
            self.name("gradients", tree_leaves(kwargs))
        elif operation == "c10d::_reduce_scatter_base_":
            self.name("gradients", tree_leaves(args))
        self._look()
        return result

    def part(self, operands: Any) -> str:
        """The part of the first tensor among operands, "" if it isn't counted."""
        first = next((leaf for leaf in tree_leaves(operands) if isinstance(leaf, Tensor)), None)
        return "" if first is None else self._storages.get(first.untyped_storage()._cdata, (0, ""))[1]

    def add(self, results: Any, casts: bool) -> None:
        """Count what compiled code stores; `casts` says whether these are copies of weights."""
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor):
                self._count(leaf, casts)
        self._look()

    def _look(self) -> None:
        """Remember the parts if this is the phase's peak so far, or still is."""
        if self.bytes >= self.peaks[-1].bytes:
            in_backward = len(self.peaks) > 2 or torch._C._current_autograd_node() is not None
            moment = "backward" if in_backward else "forward"
            self.peaks[-1] = Peak(self.bytes, moment, dict(self.parts))

    def _count(self, tensor: Tensor, casts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = (0, "activations")
            self._set(key, storage.nbytes(), self._part(tensor, casts))
            weakref.finalize(storage, self._forget, key)

    def _set(self, key: int, size: int, part: str) -> None:
        before, old = self._storages[key]
        rounded = -(-size // BLOCK) * BLOCK
        self.bytes += rounded - before
        self.parts[old] -= before
        self.parts[part] += rounded
        self._storages[key] = (rounded, part)

    def _forget(self, key: int) -> None:
        size, part = self._storages.pop(key)
        self.bytes -= size
        self.parts[part] -= size

    def _part(self, tensor: Tensor, casts: bool) -> str:
        if casts:
            return "weight copies"
        if tensor.dim() > 1 and tensor.shape[-1] == self.vocab:
            return "logits"
        if tensor.dim() == 1 and len(tensor) > self.tokens > 0:
            return FLAT
        return "gradients" if tensor.shape in self.shapes and tensor.shape[0] != self.tokens else "activations"

    def _accumulates(self, first: Tensor) -> None:
        """Autograd adds a weight's second gradient into the first, but on fake tensors into a third tensor.

        Not into a view, such as the transposed gradient of an fp32 product.
        """
        key = first.untyped_storage()._cdata
        if first.shape in self.shapes and self._storages.get(key, (0, ""))[1] == "gradients" and not first._is_view():
            self._set(key, 0, "gradients")


def split_step(ledger: Ledger, model: Llama, optimizer: torch.optim.Optimizer) -> None:
    """Begin phases of the ledger where the model has returned, if it is called (autocast's copies of its weights end
    there), where backward reaches the last block but one and the first, and at the optimizer."""
    layers = model.layers

    def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _gradient: ledger.begin_phase())

    for block in {layers[-2], layers[0]} if len(layers) > 1 else ():
        block.register_forward_hook(hook)
    model.register_forward_hook(lambda *_: ledger.begin_phase())
    optimizer.register_step_pre_hook(lambda *_: None if in_backward() else ledger.begin_phase())


def in_backward() -> bool:
    """Whether autograd is at work: an optimizer may step there."""
    return torch._C._current_graph_task_id() != -1


def deepened(phases: Callable[[int], list[Peak]], layers: int) -> Peak:
    """The peak of a step of many layers, from the peaks of its phases with two layers and with three.

    In forward, and until backward has left the last block, memory grows with each layer by what the layer saves; from
    the first block on by its gradients; in between, a phase that a step of two layers lacks, by the larger of the two.
    """
    fewer, more = COUNTED_LAYERS
    if layers <= more:
        return max(phases(layers), key=_bytes)
    low, (*forward, early, middle, late, last) = phases(fewer), phases(more)
    high = (*forward, early, late, last)
    steps = [_plus(deeper, shallow, -1) for deeper, shallow in zip(high, low, strict=True)]
    deep = [_plus(peak, step, layers - more) for peak, step in zip(high, steps, strict=True)]
    deep.append(_plus(middle, max(steps[-3:-1], key=_bytes), layers - more))
    return max(deep, key=_bytes)


def _plus(peak: Peak, other: Peak, times: int) -> Peak:
    parts = {part: size + times * other.parts[part] for part, size in peak.parts.items()}
    return Peak(sum(parts.values()), peak.moment, parts)


def _bytes(peak: Peak) -> int:
    return peak.bytes
