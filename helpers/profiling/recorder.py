"""Hooks that log when calls of modules begin and end, and which call's backward is running. `spans` interprets the log.

Forward: a hook before and one after each module.

Backward: autograd numbers its nodes as forward makes them, and runs the ready ones from the highest number down. A node
always has a higher number than those that it passes gradients to, so a backward runs its nodes in exactly the reverse
of forward's order. (A parameter's gradient is accumulated as soon as it can be: after a node of a module that uses it.)
A call of a module made a range of numbers. Hence its backward is one interval, and calls nest in backward as in
forward, also with skip connections. The interval of a call begins at the last node that was made before the next call
began or this one ended; a hook on that node reports it. It is nearly always the `grad_fn` of a tensor that is passed on
at that point. Where it isn't, and where the graph continues below the outermost call, the graph is walked when backward
arrives.

Nothing is inserted into the graph: numerics, in-place operations and the identity of tensors stay as they are.
`nn.Module`'s backward hooks would take fewer lines, but they insert nodes, which breaks in-place operations on a
module's output and makes `query is key` false. A backward that torch runs on two devices at once has no known order.

Cost on the host: two hooks a call, up to two hooks on nodes, and the walk where it is needed, about 2 µs a node. The
hooks do little, because rarely run code runs from a cold cache, at several times its usual cost. Hooks on modules are
removed by `detach`. Those on nodes are freed with the graph, and do nothing once recording has ended.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .meters import SavedBytes

# Private functions that torch.autograd.graph is built on: the number of this thread's next node, the node that is
# running, the id of the backward that this thread is in (−1: none), and whether that backward will run a node.
_next_number = torch.autograd._get_sequence_nr
_running_node = torch._C._current_autograd_node
_backward_id = torch._C._current_graph_task_id
_will_run = torch._C._will_engine_execute_node

_ACCUMULATES = 2**64 - 1  # the number of every AccumulateGrad node


# The log's entries are tuples.
#     (module, mark, number)                a call began within another; `number` is that of autograd's next node
#     (module, mark, number, backward id)   an outermost call began; the id is −1, or that of the backward it is part of
#     (~module, mark, number)               a call ended
#     (SWITCH, mark, number, run)           backward: the node of that number is about to run
#     (END, mark, 0, run)                   backward: the last node of the run, or an AccumulateGrad after it, has run
#     (EDGE, mark)                          the step begins, or ends
SWITCH, END, EDGE = 2**30, 2**30 + 1, 2**30 + 2
Entry = tuple


@dataclass(eq=False, slots=True)
class Call:
    """A call of a module within a run."""

    module: int
    parent: "Call | None"


@dataclass(eq=False)
class Run:
    """An outermost call with all calls inside it; their nodes have consecutive numbers."""

    begin: int  # its first entry in the log
    lowest: int  # its first node's number
    walked: bool  # whether its graph has to be walked in backward
    entries: list[Entry] | None = None  # once it is over
    watched: set[int] = field(default_factory=set)  # nodes with a hook
    carrier: Tensor | None = None  # an empty tensor that registers that hook
    seen: set[int] = field(default_factory=set)  # nodes that were walked in this backward
    finished: bool = False  # whether this backward has run the run's last node
    starts: list[int] = field(default_factory=list)  # nodes from starts[i] on were made directly by owners[i]
    owners: list[Call | None] = field(default_factory=list)

    def sort_numbers(self, entries: list[Entry]) -> None:
        """Set `starts` and `owners`: which call made which numbers."""
        stack: list[Call] = []
        self.starts, self.owners = [], []
        for entry in entries:
            module = entry[0]
            if module >= SWITCH:
                continue
            if module >= 0:
                stack.append(Call(module, stack[-1] if stack else None))
            elif any(call.module == ~module for call in stack):
                while stack.pop().module != ~module:
                    pass
            self.starts.append(entry[2])
            self.owners.append(stack[-1] if stack else None)

    def owner(self, number: int) -> Call | None:
        if not self.starts:
            self.sort_numbers(self.entries)
        return self.owners[bisect_right(self.starts, number) - 1]


class Recorder:
    """Hooks on modules and a log, from `start` to `stop`."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._recording = False
        self._log: list[Entry] = []
        self._stack: list[int] = []  # the modules that have been entered and not left
        self._run: Run | None = None  # the run that forward is in, or was in last
        self._boundary = 0  # the next node's number when a call last began or ended
        self._backwards: dict[int, Run] = {}  # which run each backward is in
        self._current: Run | None = None  # the run that backward is in
        self._handles: list[Any] = []  # of hooks on modules
        self._mark: Callable[[], Any] | None = None  # what these hooks mark entries with
        self._ends: list[Any] = []  # hooks on nodes that may outlive a graph

    def start(self, mark: Callable[[], Any], saved: SavedBytes | None = None) -> None:
        """Begin a log with marks made by `mark`; with `saved`, count what autograd saves."""
        if self._mark != mark:
            self.detach()
            self._mark = mark
            for index, module in enumerate(self._modules):
                before, after = self._hooks(index)
                self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                self._handles.append(module.register_forward_hook(after, always_call=True))
        self._saved, self._recording = saved, True
        self._log.append((EDGE, mark()))

    def stop(self) -> list[Entry] | None:
        """The log, or None if none was begun. The modules keep their hooks for the next `start`, until `detach`."""
        if not self._recording:
            return None
        self._log.append((EDGE, self._mark()))
        self._recording = False
        if self._saved is not None:
            self._saved.close()
        if self._run is not None and self._run.entries is None:
            self._run.entries = self._log[self._run.begin :]
        log = self._log.copy()
        self._log.clear()
        self._stack.clear()
        self._backwards.clear()
        self._current = None
        for handle in self._ends:
            handle.remove()
        self._ends.clear()
        return log

    def detach(self) -> None:
        self.stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._mark = None

    def _hooks(self, index: int) -> tuple[Callable, Callable]:
        """The hooks before and after a call of a module; the latter runs even if the call raised."""
        # Locals, since attribute look-ups would cost time in every call.
        write, stack, mark, next_number, exit_code = self._log.append, self._stack, self._mark, _next_number, ~index

        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            number = next_number()
            if not stack:
                self._begin_run(index, number, (args, kwargs))
            else:
                if number != self._boundary:
                    self._watch_last(args[0] if len(args) == 1 and not kwargs else (args, kwargs), number)
                write((index, mark(), number))
            self._boundary = number
            stack.append(index)

        def after(module: nn.Module, args: tuple, output: Any) -> None:
            if not stack:  # another pre-hook raised before `before` ran
                return
            number = next_number()
            write((exit_code, mark(), number))
            if number != self._boundary:
                self._watch_last(output, number)
            self._boundary = number
            while index in stack and stack.pop() != index:  # calls whose end an interrupt skipped
                pass
            if not stack:
                self._run.entries = self._log[self._run.begin :]
                if self._saved is not None:
                    self._saved.close()

        return before, after

    def _begin_run(self, index: int, number: int, arguments: Any) -> None:
        backward = _backward_id()
        if self._saved is not None and backward < 0:
            self._saved.open(self._stack)
        walked = any(tensor.grad_fn is not None for tensor in tensors(arguments))
        self._run, self._current = Run(len(self._log), number, walked), None
        self._log.append((index, self._mark(), number, backward))

    def _watch_last(self, passed_on: Any, number: int) -> None:
        """Watch the last node made since the last boundary, by way of the tensors passed on here."""
        earlier = []
        for tensor in (passed_on,) if isinstance(passed_on, Tensor) else tensors(passed_on):
            node = tensor.grad_fn
            if node is not None:
                made = node._sequence_nr()
                if made == number - 1:
                    self._watch(self._run, node, made)
                    return
                earlier.append((node, made))
        self._run.walked = True
        for node, made in earlier:  # backward can enter only through these
            if made >= self._run.lowest:
                self._watch(self._run, node, made)

    def _watch(self, run: Run, node: Any, number: int) -> None:
        """Have `_reached` called when the node is about to run.

        The nodes of a run share a hook, which an empty tensor registers as `Tensor.register_hook` does, through the
        private `_register_hook_dict`. This costs a tenth of `Node.register_prehook`.
        """
        if number in run.watched:
            return
        if run.carrier is None:
            run.carrier = torch.empty(0, requires_grad=True)
            run.carrier._backward_hooks = {0: partial(self._reached, run)}
        run.watched.add(number)
        node._register_hook_dict(run.carrier)

    def _reached(self, run: Run, gradient: Tensor | None) -> None:
        """The backward of a call begins: the watched node is about to run."""
        if not self._recording:
            return
        node = _running_node()
        number = node._sequence_nr()
        if run is not self._current:
            self._switch_run(run)
        if run.walked and number not in run.seen:
            self._watch_boundaries(run, node, number)
        self._log.append((SWITCH, self._mark(), number, run))

    def _switch_run(self, run: Run) -> None:
        """Backward enters a run, at its beginning or after another run."""
        backward = _backward_id()
        previous = self._backwards.get(backward)
        if previous is None:  # the engine's private callback, called at the end of this backward
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._backward_ended, backward))
        elif previous is not run:
            self._end_backward(previous)
        if previous is not run:
            run.seen.clear()
        self._backwards[backward] = self._current = run

    def _backward_ended(self, backward: int) -> None:
        run = self._backwards.pop(backward, None)
        if self._recording and run is not None:
            self._end_backward(run)
        self._current = None

    def _end_backward(self, run: Run) -> None:
        if not run.finished:
            self._log.append((END, self._mark(), 0, run))
        run.finished = False
        run.carrier = None  # its hook refers to the run: breaks the reference cycle

    def _watch_boundaries(self, run: Run, first: Any, first_number: int) -> None:
        """Walk the graph; watch the nodes at which the backward of another call begins, and the last node."""
        run.finished = False
        run.sort_numbers(self._log[run.begin :] if run.entries is None else run.entries)
        nodes = _below(first, first_number, run.lowest, run.seen)
        order = sorted(nodes, reverse=True)
        starts, owners, index, owner = run.starts, run.owners, len(run.starts) - 1, None
        for number in order:
            while starts[index] > number:
                index -= 1
            if owners[index] is not owner and _will_run(nodes[number]):
                owner = owners[index]
                self._watch(run, nodes[number], number)
        last = next((nodes[number] for number in reversed(order) if _will_run(nodes[number])), first)
        interrupted = next((e for e in reversed(self._log) if e[0] in (SWITCH, END) and e[3] is run), None)
        if interrupted is None or interrupted[0] == END:
            hook = partial(self._last_node_ran, (END, 0, run))
            accumulators = [node for node, _ in last.next_functions if node and node._sequence_nr() == _ACCUMULATES]
            self._ends += [node.register_hook(hook) for node in accumulators]
        else:  # a side branch, such as an auxiliary loss; after it the call that it interrupted continues
            hook = partial(self._last_node_ran, (SWITCH, interrupted[2], run))
        last.register_hook(hook)

    def _last_node_ran(self, entry: tuple, *gradients: Any) -> None:
        if self._recording:
            what, number, run = entry
            run.finished = what == END
            self._log.append((what, self._mark(), number, run))


def _below(first: Any, first_number: int, lowest: int, seen: set[int]) -> dict[int, Any]:
    """The first node and those reachable from it, by number: not below `lowest` and not yet seen."""
    seen.add(first_number)
    nodes, todo = {first_number: first}, [first]
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is None:
                continue
            number = node._sequence_nr()
            if lowest <= number < _ACCUMULATES and number not in seen:
                seen.add(number)
                nodes[number] = node
                todo.append(node)
    return nodes


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
