"""Hooks that write down when modules are entered and left, and whose backward is running. They interpret nothing.

Forward: a hook before and one after each module.

Backward: autograd numbers its nodes as forward makes them, and runs those that are ready from the highest number down;
what a node feeds always has a higher number, so a backward runs its nodes in exactly the reverse of forward's order.
(A parameter's gradient is added up as soon as it can be: after a node of a module that uses it.) A call of a module
made a range of numbers. Hence it has one stretch of backward, and calls nest in backward as they nested in forward,
skip connections or not. The stretch of a call begins at the last node that was made before the next call began or this
one ended, and that node is watched. It is nearly always the one that made what is passed on there. Where it isn't, and
where the graph goes on below the outermost call, the graph is walked when backward arrives.

Nothing is inserted into the graph: numerics, in-place operations and the identity of tensors stay as they are. Modules'
own backward hooks would be fewer lines, but they insert nodes, which breaks in-place operations on what a module
returns and makes `query is key` false. Of a backward that torch runs on two devices at once the order is not known.

What it costs on the host: two hooks a call and up to two nodes' hooks, which do as little as can be (code that runs
once in a while runs from a cold cache, at several times its usual price); and the walk where it is needed, some 2 µs a
node. Hooks on modules are removed by `detach`. Those on nodes die with the graph; until then they do nothing.
"""

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .meters import SavedBytes

# What autograd tells about itself: the number that the next node of this thread gets, the node that runs, the backward
# that this thread is in (−1: none), and whether that backward will run a node. torch.autograd.graph is built on them.
_next_number = torch.autograd._get_sequence_nr
_running_node = torch._C._current_autograd_node
_backward_id = torch._C._current_graph_task_id
_will_run = torch._C._will_engine_execute_node

_ACCUMULATES = 2**64 - 1  # the number of all nodes that add to a parameter's gradient


# The log's entries are tuples.
#     (module, mark, number)                a call began within another; `number` is that of autograd's next node
#     (module, mark, number, backward id)   an outermost call began; the id is −1, or that of the backward it is part of
#     (~module, mark, number)               a call ended
#     (SWITCH, mark, number, run)           in backward: the node of that number is about to run
#     (END, mark, 0, run)                   the last node of the run has run, or the sum of a gradient that it fed
#     (EDGE, mark)                          the step begins, or ends
SWITCH, END, EDGE = 2**30, 2**30 + 1, 2**30 + 2
Entry = tuple


class Call:
    """A call of a module within a run."""

    __slots__ = ("module", "parent")

    def __init__(self, module: int, parent: "Call | None") -> None:
        self.module, self.parent = module, parent


class Run:
    """An outermost call with all that it called: their nodes are numbered one after another."""

    def __init__(self, begin: int, lowest: int, walked: bool) -> None:
        self.begin, self.lowest = begin, lowest  # its first entry in the log, its first number
        self.walked = walked  # whether its graph has to be walked in backward
        self.entries: list[Entry] | None = None  # once it is over
        self.watched: set[int] = set()  # nodes with a hook
        self.carrier: Tensor | None = None  # of that hook
        self.seen: set[int] = set()  # nodes that were met in this backward
        self.left = False  # whether this backward has run the last of the planned nodes
        self.starts: list[int] = []  # nodes from starts[i] on, up to starts[i + 1], were made directly by owners[i]
        self.owners: list[Call | None] = []

    def sort_numbers(self, entries: list[Entry]) -> None:
        """Find out which call made which numbers."""
        self.starts, self.owners, stack = [], [], []
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
        self._run: Run | None = None  # of forward
        self._boundary = 0  # the next node's number when a call last began or ended
        self._backwards: dict[int, Run] = {}  # which run each backward is in
        self._current: Run | None = None  # the run that backward is in
        self._handles: list[Any] = []  # of hooks on modules
        self._attached: Callable | None = None  # the mark of these
        self._ends: list[Any] = []  # hooks on nodes that may outlive a graph

    def start(self, mark: Callable[[], Any], saved: SavedBytes | None = None) -> None:
        """Begin a log with marks by `mark`; with `saved`, count what autograd saves."""
        if self._attached != mark:
            self.detach()
            self._mark, self._attached = mark, mark
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
        self._attached = None

    def _hooks(self, index: int) -> tuple[Callable, Callable]:
        """What runs before and after a call of a module: after it, even if it raised."""
        write, stack, mark, number, left = self._log.append, self._stack, self._mark, _next_number, ~index

        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            at = number()
            if not stack:
                self._begin_run(index, at, (args, kwargs))
            else:
                if at != self._boundary:
                    self._watch_last(args[0] if len(args) == 1 and not kwargs else (args, kwargs), at)
                write((index, mark(), at))
            self._boundary = at
            stack.append(index)

        def after(module: nn.Module, args: tuple, output: Any) -> None:
            if not stack:  # a hook of others raised before the call was entered
                return
            at = number()
            write((left, mark(), at))
            if at != self._boundary:
                self._watch_last(output, at)
            self._boundary = at
            if stack and stack[-1] == index:
                stack.pop()
            else:
                self._unwind(index)
            if not stack:
                self._end_run()

        return before, after

    def _begin_run(self, index: int, number: int, arguments: Any) -> None:
        backward = _backward_id()
        if self._saved is not None and backward < 0:
            self._saved.open(self._stack)
        walked = any(tensor.grad_fn is not None for tensor in tensors(arguments))
        self._run, self._current = Run(len(self._log), number, walked), None
        self._log.append((index, self._mark(), number, backward))

    def _end_run(self) -> None:
        self._run.entries = self._log[self._run.begin :]
        if self._saved is not None:
            self._saved.close()

    def _unwind(self, index: int) -> None:
        """Drop calls that an interrupt kept from being left. A call that another hook kept from being entered isn't."""
        while index in self._stack and self._stack.pop() != index:
            pass

    def _watch_last(self, passed_on: Any, number: int) -> None:
        """Nodes were made since the last boundary: watch the last of them, found by what is passed on."""
        others = []
        for tensor in (passed_on,) if isinstance(passed_on, Tensor) else tensors(passed_on):
            node = tensor.grad_fn
            if node is not None:
                at = node._sequence_nr()
                if at == number - 1:
                    self._watch(self._run, node, at)
                    return
                others.append((node, at))
        self._run.walked = True
        for node, at in others:  # backward arrives here, if anywhere
            if at >= self._run.lowest:
                self._watch(self._run, node, at)

    def _watch(self, run: Run, node: Any, number: int) -> None:
        """Have `_reached` called when the node is about to run.

        The nodes of a run share a hook: a tensor carries it to them, by the way that `Tensor.register_hook` takes. This
        costs a tenth of `Node.register_prehook`.
        """
        if number in run.watched:
            return
        if run.carrier is None:
            run.carrier = torch.empty(0, requires_grad=True)
            run.carrier._backward_hooks = {0: partial(self._reached, run)}
        run.watched.add(number)
        node._register_hook_dict(run.carrier)

    def _reached(self, run: Run, gradient: Tensor | None) -> None:
        """A stretch of backward begins."""
        if not self._recording:
            return
        node = _running_node()
        number = node._sequence_nr()
        if run is not self._current:
            self._turn_to(run)
        if run.walked and number not in run.seen:
            self._plan(run, node, number)
        self._log.append((SWITCH, self._mark(), number, run))

    def _turn_to(self, run: Run) -> None:
        """Backward comes to a run, for the first time or after another."""
        backward = _backward_id()
        before = self._backwards.get(backward)
        if before is None:
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._over, backward))
        elif before is not run:
            self._end_backward(before)
        if before is not run:
            run.seen.clear()
        self._backwards[backward] = self._current = run

    def _over(self, backward: int) -> None:
        """A backward is over."""
        run = self._backwards.pop(backward, None)
        if self._recording and run is not None:
            self._end_backward(run)
        self._current = None

    def _end_backward(self, run: Run) -> None:
        if not run.left:
            self._log.append((END, self._mark(), 0, run))
        run.left = False
        run.carrier = None  # it leads back to the run: no ring is left for the garbage collector

    def _plan(self, run: Run, first: Any, first_number: int) -> None:
        """Walk the graph; watch the nodes at which another call's stretch begins, and the last."""
        run.left = False
        run.sort_numbers(self._log[run.begin :] if run.entries is None else run.entries)
        nodes = _below(first, first_number, run.lowest, run.seen)
        order = sorted(nodes, reverse=True)
        starts, owners, place, owner = run.starts, run.owners, len(run.starts) - 1, None
        for number in order:
            while starts[place] > number:
                place -= 1
            if owners[place] is not owner and _will_run(nodes[number]):
                owner = owners[place]
                self._watch(run, nodes[number], number)
        last = next((nodes[number] for number in reversed(order) if _will_run(nodes[number])), first)
        interrupted = next((e for e in reversed(self._log) if e[0] in (SWITCH, END) and e[3] is run), None)
        if interrupted is None or interrupted[0] == END:
            leave = partial(self._left, (END, 0, run))
            accumulators = [node for node, _ in last.next_functions if node and node._sequence_nr() == _ACCUMULATES]
            self._ends += [node.register_hook(leave) for node in accumulators]
        else:  # a side branch, such as that of an auxiliary loss: then its neighbour goes on
            leave = partial(self._left, (SWITCH, interrupted[2], run))
        last.register_hook(leave)

    def _left(self, entry: tuple, *gradients: Any) -> None:
        """The last planned node has run."""
        if self._recording:
            what, number, run = entry
            run.left = what == END
            self._log.append((what, self._mark(), number, run))


def _below(first: Any, first_number: int, lowest: int, seen: set[int]) -> dict[int, Any]:
    """The nodes that the first one leads to, by number, not below `lowest` and not yet seen; it among them."""
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
    """The tensors that a module returned, in tuples, lists, mappings and dataclasses. Iterators are not used up."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors(getattr(output, field.name, None))
