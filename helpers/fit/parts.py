"""SIMULATION: memory of a training step on one device, counted by part: the `Trainer` on fake tensors."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from helpers.rush import Setup
from helpers.rush.trainer import Trainer

from .derived import Peak
from .rank import Ledger

AT_REST = ("weights", "optimizer", "tables, tokens")  # allocated between steps, too
PARTS = (*AT_REST, "weight copies", "gradients", "activations", "logits")


def at_rest(peak: Peak) -> int:
    """Bytes that stay allocated between steps."""
    return sum(peak.parts[part] for part in AT_REST)


def count(setup: Setup) -> Peak:
    """The peak of a training step of an uncompiled setup, after the first, by part. It takes a second or two.

    The part "activations" is all that isn't another part. `at_rest` bytes are allocated between steps, too.
    """
    if setup.compile != "none":
        raise ValueError(f"compile is {setup.compile!r}; what a compiler saves isn't counted: take 'none'")
    ledger = PartsLedger(setup)
    with FakeTensorMode(), ledger:
        trainer = Trainer(setup, torch.device("cpu"))
        weights = list(trainer.model.parameters())
        for weight in weights:  # the optimizer's state, without the cost of a first step
            weight.grad = torch.zeros_like(weight)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        tokens = torch.zeros(setup.batch, setup.sequence + 1, dtype=torch.long)
        ledger.name("weights", weights)
        ledger.name("optimizer", tree_leaves([dict(state) for state in trainer.optimizer.state.values()]))
        ledger.name("tables, tokens", [*trainer.model.buffers(), tokens])
        for weight in weights:
            weight.register_post_accumulate_grad_hook(lambda weight: ledger.name("gradients", [weight.grad]))
        ledger.reset_peak()
        trainer.step(tokens)
    return Peak(ledger.peak_bytes, ledger.moment, ledger.at_peak)


class PartsLedger(Ledger):
    """A `Ledger` that knows each storage's part, and keeps the parts' bytes of the peak's moment.

    A result is told by its operation and shape: a cast of a weight; logits end in the vocabulary; gradients have a
    weight's shape. Where an activation has a weight's shape as well, a gradient counts as an activation until it is
    complete.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.tokens, self.kinds, self.at_peak, self.moment = setup.batch * setup.sequence, {}, {}, ""
        self.shapes: set[torch.Size] = set()
        self.vocab = 0

    def name(self, part: str, tensors: list[Any]) -> None:
        """Say which part tensors are."""
        tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        self.kinds |= {tensor.untyped_storage()._cdata: part for tensor in tensors}
        if part == "weights":
            self.shapes = {tensor.shape for tensor in tensors}
            self.vocab = tensors[0].shape[0]  # the embedding's rows

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = self.peak_bytes
        if function is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            self._accumulates(args[0])
        result = super().__torch_dispatch__(function, types, args, kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.kinds.setdefault(leaf.untyped_storage()._cdata, self._part(leaf, function, args))
        if self.peak_bytes > before:
            self.at_peak = dict.fromkeys(PARTS, 0)
            for key, size in self._sizes.items():
                self.at_peak[self.kinds.get(key, "activations")] += size
            self.moment = "backward" if torch._C._current_autograd_node() is not None else "forward"
        return result

    def _accumulates(self, first: torch.Tensor) -> None:
        """Autograd adds a weight's second gradient into the first, but on fake tensors into a third tensor.

        Not into a view, such as the transposed gradient of an fp32 product.
        """
        key = first.untyped_storage()._cdata
        if first.shape in self.shapes and self.kinds.get(key) == "gradients" and not first._is_view():
            self._set(key, 0)

    def _part(self, tensor: torch.Tensor, function: Any, args: tuple) -> str:
        casts = function is torch.ops.aten._to_copy.default
        if casts and self.kinds.get(args[0].untyped_storage()._cdata) == "weights":
            return "weight copies"
        if tensor.dim() > 1 and tensor.shape[-1] == self.vocab:
            return "logits"
        return "gradients" if tensor.shape in self.shapes and tensor.shape[0] != self.tokens else "activations"

    def _forget(self, key: int) -> None:
        super()._forget(key)
        self.kinds.pop(key, None)
