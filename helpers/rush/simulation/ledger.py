"""Counts the bytes that tensors hold, as a caching allocator would, without there being any memory.

    with FakeTensorMode(), Ledger() as ledger:
        step()
    ledger.peak_bytes

It sees every operation, so it costs some 20 µs for each; under `FakeTensorMode` nothing is computed and nothing
allocated: the 8B model is counted on a laptop.
"""

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK = 512  # bytes: the CUDA allocator hands out multiples of it
_INFERS = "_propagate_tensor_meta_non_cached"


class Ledger(TorchDispatchMode):
    """Bytes of the storages that live, each counted once, from the operation that makes it until nothing holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}  # by storage
        self._resize = torch.UntypedStorage.resize_
        self._infer = getattr(ShardingPropagator, _INFERS)
        self._inferring = False

    def reset_peak(self) -> None:
        self.peak_bytes = self.bytes

    def __enter__(self) -> "Ledger":
        # FSDP frees what it gathered by resizing the storage to nothing, which is no operation on tensors.
        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, storage.nbytes())

        # DTensor tries operations on tensors of the global shapes, to learn the shape of what comes out: in training,
        # too, those have no memory.
        def infer(*args: Any, **kwargs: Any) -> Any:
            self._inferring = True
            try:
                return self._infer(*args, **kwargs)
            finally:
                self._inferring = False

        torch.UntypedStorage.resize_ = resize_
        setattr(ShardingPropagator, _INFERS, infer)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        setattr(ShardingPropagator, _INFERS, self._infer)
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes first, and its operations on local tensors come here
        result = function(*args, **(kwargs or {}))
        if self._inferring:
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._set(key, storage.nbytes())
            weakref.finalize(storage, self._forget, key)

    def _set(self, key: int, size: int) -> None:
        rounded = -(-size // BLOCK) * BLOCK
        self.bytes += rounded - self._sizes[key]
        self._sizes[key] = rounded
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _forget(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)
