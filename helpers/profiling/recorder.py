"""Spans of the calls of modules, forward and backward, by hooks.

Forward: a hook before and one after each module.

Backward: a hook on the node of each tensor that a module gets or gives, which says whose node is about to run. From
there until the next such node, time is that module's. Autograd runs a call's nodes one after the other, in the reverse
of forward's order, so calls nest in backward as in forward. What a module computes without passing it on or returning
it, and what it changes in place within views, counts for the module whose backward comes before it.

Nothing is inserted into the graph: numerics, in-place operations and the identity of tensors stay as they are.
`nn.Module`'s backward hooks insert nodes, which breaks in-place operations on a module's output and makes `query is
key` false.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from .meters import SavedBytes

STEP, FORWARD, BACKWARD, RECOMPUTE = "step", "forward", "backward", "recompute"
# Private: the id of the backward that this thread is in, or −1, and the node that is running.
_backward_id, _running_node = torch._C._current_graph_task_id, torch._C._current_autograd_node


@dataclass(eq=False, slots=True)
class Span:
    """`begin` and `end` are indices of marks."""

    kind: str
    module: int  # −1: the step
    parent: "Span | None"
    begin: int
    call: "Span | None" = None  # of a backward
    end: int = -1
    range: record_function | None = None  # in a trace of torch's profiler, while one records

    @property
    def calls(self) -> list["Span"]:
        """A call and those around it."""
        calls, span = [], self
        while span.parent is not None:
            span = span.call or span
            calls.append(span)
            span = span.parent
        return calls


class Recorder:
    """Hooks on modules, and the spans from `start` to `stop`."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._handles: list[Any] = []  # of hooks on modules
        self._open: list[Span] = []  # outermost first

    def start(self, mark: Callable[[], Any], saved: SavedBytes | None = None) -> None:
        """Begin with marks made by `mark`; with `saved`, count what autograd saves."""
        self._mark, self._saved = mark, saved
        self.marks: list[Any] = [mark()]
        self.spans: list[Span] = []
        self._open = []
        self._backwards: dict[int, int] = {}  # a backward's id -> how many spans were open before it
        self._calls: dict[int, Span | None] = {}  # a node's number, counted by autograd -> the call that made it
        # An empty tensor registers one hook on all nodes, as `Tensor.register_hook` does, through the private
        # `_register_hook_dict`. This costs a tenth of `Node.register_prehook`.
        self._carrier = torch.empty(0, requires_grad=True)
        self._carrier._backward_hooks = {0: partial(self._reached, self._calls)}
        self._push(STEP, -1, 0)
        for index, (path, module) in enumerate(self._modules.items() if not self._handles else ()):
            before, after = partial(self._enter, index, path), partial(self._leave, index)
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, always_call=True))

    def stop(self) -> bool:
        """End the step that was begun, if any. The modules keep their hooks for the next one, until `detach`."""
        if not self._open:
            return False
        self._close_all_but(1, len(self.marks) - 1)
        self._close_all_but(0, self._now())
        if self._saved is not None:
            self._saved.close()
        return True

    def detach(self) -> None:
        self.stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _now(self) -> int:
        self.marks.append(self._mark())
        return len(self.marks) - 1

    def _push(self, kind: str, module: int, at: int, call: Span | None = None) -> None:
        self.spans.append(Span(kind, module, self._open[-1] if self._open else None, at, call))
        self._open.append(self.spans[-1])

    def _close_all_but(self, count: int, at: int) -> None:
        while len(self._open) > count:
            span = self._open.pop()
            span.end = at
            if span.range is not None:
                span.range.__exit__(None, None, None)

    def _enter(self, index: int, path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        inside_backward = _backward_id() >= 0
        while not inside_backward and self._open[-1].kind in (BACKWARD, RECOMPUTE):
            self._close_all_but(len(self._open) - 1, len(self.marks) - 1)  # an exception ended that backward
        self._watch(args[0] if len(args) == 1 and not kwargs else (args, kwargs))
        if self._saved is not None and len(self._open) == 1:
            self._saved.open(self._open)
        self._push(RECOMPUTE if inside_backward else FORWARD, index, self._now())
        if torch.autograd._profiler_enabled():
            self._open[-1].range = record_function(path)
            self._open[-1].range.__enter__()

    def _leave(self, index: int, module: nn.Module, args: tuple, output: Any) -> None:
        at = self._now()
        of_module = [place for place, span in enumerate(self._open) if span.module == index and span.call is None]
        if not of_module:  # another pre-hook raised before `_enter` ran
            return
        self._watch(output)
        self._close_all_but(of_module[-1], at)
        if self._saved is not None and of_module[-1] == 1:
            self._saved.close()

    def _watch(self, passed_on: Any) -> None:
        """Hook the nodes of tensors that are passed on; those that aren't yet are of the call that runs now."""
        running = self._open[-1] if self._open[-1].call is None and self._open[-1].parent is not None else None
        for tensor in (passed_on,) if isinstance(passed_on, Tensor) else tensors(passed_on):
            node = tensor.grad_fn
            if node is not None and (number := node._sequence_nr()) not in self._calls:
                self._calls[number] = running
                node._register_hook_dict(self._carrier)

    def _reached(self, calls_of_nodes: dict, gradient: Tensor | None) -> None:
        """A node is about to run; one of an earlier step doesn't count."""
        if calls_of_nodes is not self._calls or not self._open:
            return
        call = self._calls[_running_node()._sequence_nr()]
        backward, at = _backward_id(), self._now()
        if backward not in self._backwards:  # the engine's private callback, called at the end of this backward
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._ended, calls_of_nodes, backward))
            self._backwards[backward] = len(self._open)
        calls = call.calls if call is not None else []
        while len(self._open) > self._backwards[backward] and self._open[-1].call not in calls:
            self._close_all_but(len(self._open) - 1, at)
        running = {span.call for span in self._open}
        for missing in reversed([each for each in calls if each not in running]):
            self._push(BACKWARD, missing.module, at, missing)

    def _ended(self, calls_of_nodes: dict, backward: int) -> None:
        if calls_of_nodes is self._calls and self._open:
            self._close_all_but(self._backwards.pop(backward), self._now())


def tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of a module's output, in tuples, lists, mappings and dataclasses. Iterators are not consumed."""
    parts: Iterable[Any] = ()
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, (tuple, list)):
        parts = output
    elif is_dataclass(output) and not isinstance(output, type):
        parts = [getattr(output, field.name, None) for field in fields(output)]
    for part in parts:
        yield from tensors(part)
