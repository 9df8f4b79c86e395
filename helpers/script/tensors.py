"""What objects show of a training: padding and what pads, a backward's graph, forgotten weights, growing lists."""

import gc
import sys
from collections import deque
from collections.abc import Generator, Iterable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .source_code import padding_in, padding_line
from .stacks import Line, is_library, user_line

_ADD = {"append", "appendleft", "extend", "add"}
MOST, SOME = 1000, 8  # lists of an iteration; items of one that are looked at
MOST_NODES = 20_000  # of a graph, some 2 µs each


def padded_positions(ids: Tensor) -> tuple[int, int, int] | None:
    """Positions of a batch of token ids (B, T), those in constant ends of rows, and those that all rows have there.

    None if the ids are no such batch, or all rows are constant, such as types of tokens.
    """
    if ids.dim() != 2 or ids.is_floating_point() or min(ids.shape) < 2 or not torch.is_grad_enabled():
        return None
    ids = ids.detach().cpu()
    most, shared = 0, 0
    for flipped in (ids.flip(1), ids):  # padded behind, and before
        runs = flipped.eq(flipped[:, :1]).long().cumprod(1).sum(1)
        if bool((runs == ids.shape[1]).all()):
            return None
        padding = flipped[:, 0].mode().values
        runs = runs.where(flipped[:, 0].eq(padding) & (runs > 1), 0)
        if int(runs.sum()) > most:
            most, shared = int(runs.sum()), int(runs.min()) * ids.shape[0]
    return ids.numel(), most, shared


def batch_makers(loader: DataLoader) -> list[CodeType]:
    """The user's functions that make a batch: the one that collates, or else the dataset's."""
    collate, dataset = loader.collate_fn, loader.dataset
    while hasattr(collate, "func"):  # functools.partial
        collate = collate.func
    while not _codes(dataset) and hasattr(dataset, "dataset"):  # torch's Subset and its like
        dataset = dataset.dataset
    return _codes(collate) or _codes(dataset)


def _codes(maker: Any) -> list[CodeType]:
    """A function's code, or that of an object's methods, those first that give a sample; nothing of a library's."""
    methods = {name: method for kind in reversed(type(maker).__mro__) for name, method in vars(kind).items()}
    firsts = [methods.get(name) for name in ("__call__", "__getitems__", "__getitem__", "__iter__")]
    codes = [getattr(each, "__code__", None) for each in (maker, *firsts, *methods.values())]
    return [code for code in codes if code is not None and not is_library(code.co_filename)]


def padded_at(makers: Iterable[CodeType], files: Iterable[str]) -> Line | None:
    """The line that pads a batch: of those that make it, else of the user's files; else the function that makes it."""
    lines = [(code.co_filename, line) for code in makers if (line := padding_line(code))]
    lines += [(file, line) for file in dict.fromkeys(files) if not is_library(file) and (line := padding_in(file))]
    return next(iter([*lines, *((code.co_filename, code.co_firstlineno) for code in makers)]), None)


def unclaimed() -> Generator[None, None, tuple[str, int, float, bool] | None]:
    """Of the weights that get gradients in the next iteration, those that no optimizer has: a module, number, share.

    The share is of all numbers that get gradients; the last tells whether the module holds weights that an optimizer
    has, such as adapters, so that gradients pass through it all the same. Embeddings don't count, whose gradients cost
    little for their size.
    """
    gc.collect()  # an optimizer of an earlier training may lie around
    objects = gc.get_objects()
    optimizers = [each for each in objects if issubclass(type(each), torch.optim.Optimizer)]
    taken = {id(weight) for each in optimizers for group in each.param_groups for weight in group["params"]}
    modules = [each for each in objects if issubclass(type(each), nn.Module) and "_parameters" in vars(each)]
    inner = [module._parameters.values() for module in modules if not isinstance(module, nn.Embedding)]
    weights = {weight for each in inner for weight in each if weight is not None}
    trained = [weight for weight in weights if weight.requires_grad and weight.is_leaf]
    del objects  # which would keep all of this iteration's tensors
    reached: dict[Tensor, int] = {}
    hooks = [w.register_post_accumulate_grad_hook(lambda w: reached.update({w: w.numel()})) for w in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    gone = {weight: size for weight, size in reached.items() if id(weight) not in taken}
    if not gone or not taken:
        return None
    sizes = [sum(gone.get(weight, 0) for weight in module.parameters()) for module in modules]
    most = [module for module, size in zip(modules, sizes, strict=True) if size == max(sizes)]
    # the user's own around a layer that has the same weights, whichever Python's collector lists first
    module = min(most, key=lambda module: (len(list(module.parameters())), -len(list(module.modules()))))
    passed = any(id(weight) in taken for weight in module.parameters())
    return type(module).__name__, len(gone), sum(gone.values()) / sum(reached.values()), passed


def dependencies(roots: Tensor | Iterable[Tensor]) -> list[list[int]]:
    """The graph that a backward pass from these goes through: each node's number, then those that it goes on to.

    They are the sequence numbers that a profile has, too. Empty for a graph of too many nodes.
    """
    found: dict[int, list[int]] = {}
    waiting = [root.grad_fn for root in ([roots] if isinstance(roots, Tensor) else roots)]
    while waiting and len(found) <= MOST_NODES:
        if (node := waiting.pop()) is not None and (number := node._sequence_nr()) not in found:
            inner = [each for each, _ in node.next_functions if each is not None and not hasattr(each, "variable")]
            found[number] = [each._sequence_nr() for each in inner]
            waiting += inner
    return [] if waiting else [[number, *after] for number, after in found.items()]


class Growing:
    """The lists that one iteration adds to, and how long they are later."""

    def __init__(self) -> None:
        self._lists: dict[int, tuple[Any, int, Line]] = {}
        self._iterations = 0  # since then

    def called(self, frame: FrameType, function: Any) -> None:
        """Told of each call of a builtin function in that iteration."""
        holder, self._iterations = getattr(function, "__self__", None), 0
        if type(holder) in (list, deque, set) and function.__name__ in _ADD and len(self._lists) < MOST:
            self._lists.setdefault(id(holder), (holder, len(holder), user_line(frame)))

    def iteration_ended(self) -> None:
        self._iterations += 1
        if self._iterations == 2:  # lists that only this still knows would keep an iteration's tensors
            self._lists = {key: each for key, each in self._lists.items() if sys.getrefcount(each[0]) > 2}

    def data(self) -> list[Any]:
        """Of the largest that got an item or more in each iteration: file, line, items, graphs, bytes, collected.

        Whether its items hold graphs, the bytes that these add in an iteration, without what such graphs keep, and
        whether Python's collector goes through them.
        """
        grown: list[list[Any]] = []
        for items, before, line in self._lists.values():
            more = len(items) - before
            if line[1] and more >= max(self._iterations - 1, 2):
                some = [each for _, each in zip(range(SOME), items, strict=False)]
                size = sum(map(_bytes, some)) / len(some) * more / max(self._iterations, 1)
                graphs = any(isinstance(each, Tensor) and each.requires_grad for each in some)
                grown.append([*line, len(items), graphs, size, any(map(gc.is_tracked, some))])
        return sorted(grown, key=lambda row: (-row[3], -row[4]))[:1]


def _bytes(item: Any, depth: int = 3) -> float:
    """What an item keeps, as far as it holds tensors, arrays and containers; of large ones by some of theirs."""
    if isinstance(size := getattr(item, "nbytes", None), int):
        return size
    inner = [*item, *item.values()] if isinstance(item, dict) else item if isinstance(item, list | tuple | set) else []
    some = [_bytes(each, depth - 1) for _, each in zip(range(SOME), inner, strict=False)] if depth else []
    return sys.getsizeof(item, 64) + (sum(some) / len(some) * len(inner) if some else 0.0)
