"""What autograd keeps for backward, counted as it is kept and as it is let go."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Kept:
    """Counts bytes by saved-tensor hooks, between `open` and `close`; `level_bytes` is what is kept at the moment.

    Each storage counts once, whole, for the call that kept it first; those of `without` don't. Hooks that the model
    sets inside, as activation checkpointing does, take precedence: what they keep is theirs and isn't counted.
    """

    def __init__(self, without: Iterable[Tensor], modules: int) -> None:
        self.level_bytes = self.total_bytes = 0
        self.module_bytes = np.zeros(modules)  # for each module and what it calls
        self._holders = dict.fromkeys((_storage(tensor)[0] for tensor in without), 1)  # address → how many hold it
        self._hooks: saved_tensors_hooks | None = None
        self._stack: Sequence[int] = []

    def open(self, stack: Sequence[int]) -> None:
        """Begin to count; `stack` holds, at any time, the modules that are running."""
        if self._hooks is None and torch._C._autograd._saved_tensors_hooks_is_enabled():
            self._stack = stack
            self._hooks = saved_tensors_hooks(self._pack, _unpack)
            self._hooks.__enter__()

    def close(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
        self._hooks = None

    def _pack(self, tensor: Tensor) -> "_Held":
        address, size = _storage(tensor)
        holders = self._holders.get(address, 0)
        self._holders[address] = holders + 1
        if not holders:
            self.level_bytes += size
            self.total_bytes += size
            self.module_bytes[list(set(self._stack))] += size
        return _Held(self, tensor)

    def let_go(self, tensor: Tensor) -> None:
        address, size = _storage(tensor)
        self._holders[address] -= 1
        if not self._holders[address]:
            del self._holders[address]
            self.level_bytes -= size


class _Held:
    """A kept tensor. Its address can't be used again while this holds it; when autograd drops this, it is let go."""

    __slots__ = ("ledger", "tensor")

    def __init__(self, ledger: Kept, tensor: Tensor) -> None:
        self.ledger, self.tensor = ledger, tensor

    def __del__(self) -> None:
        self.ledger.let_go(self.tensor)


def _unpack(held: _Held) -> Tensor:
    return held.tensor


def _storage(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of what a tensor lies in. One without a storage of its own (sparse) counts as nothing."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):
        return -1, 0
