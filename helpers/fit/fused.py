"""What a compiler makes of a function, on fake tensors: which results are stored, and which kernels remain.

    with FakeTensorMode(), ledger, meter:
        block.forward = Compiler().compiled(block.forward)

torch's own tracer and partitioner choose what forward saves for backward. Of the graphs that they give, Inductor's
fusion is imitated by three rules:

- products, attention and custom operators are kernels of their own; all else can be fused;
- operations that depend on equally many of these kernels, and on one another or on the same tensor, are one kernel, but
  a reduction over rows is one of its own: it needs another order of the elements;
- stored is what another kernel reads or what is returned. A kernel moves what it reads of stored tensors, and what it
  stores. A stored result takes the place of a tensor of its size that nobody reads afterwards.

Tracing takes a second or two for each function.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from .ledger import Ledger
from .meter import Kernel, Meter, kernels, launches_nothing, stands_alone, stored_bytes

Function = Callable[..., Any]


class Compiler:
    """Functions as compiled ones, on fake tensors. What it has traced serves all models of the same code and sizes."""

    def __init__(self) -> None:
        self.traced: dict[tuple[str, str, bool], Function] = {}

    def compiled(self, function: Function, **_options: Any) -> Function:
        """`function`, whose operations the `Ledger` and `Meter` around a call count as those of compiled code.

        It may be a module's method, or take a module first.
        """

        def call(*inputs: Any) -> Any:
            owner = getattr(function, "__self__", inputs[0])
            module = owner if isinstance(owner, nn.Module) else nn.Module()
            weights = dict(module.named_parameters())
            values = [*weights.values(), *(value for value in inputs if isinstance(value, Tensor))]
            # What is traced keeps `flat`, which must not keep a tensor of this call.
            names, others = list(weights), [None if isinstance(value, Tensor) else (value,) for value in inputs]

            def flat(*given: Tensor) -> Any:
                tensors = iter(given[len(names) :])
                with _reparametrize_module(module, dict(zip(names, given, strict=False))):
                    return function(*(next(tensors) if other is None else other[0] for other in others))

            shapes = [(value.shape, value.dtype) for value in values]
            key = (function.__qualname__, str(shapes), torch.is_grad_enabled())
            if key not in self.traced:
                static = [place for place, value in enumerate(values) if isinstance(value, nn.Parameter)]
                self.traced[key] = _traced(flat, static)
                # On tensors of its own, since what is traced keeps them; a checkpoint around it saves none of them.
                with _uncounted(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
                    self.traced[key](*map(_another, values))
            return self.traced[key](*values)

        return call


def _same(value: Any) -> Any:
    return value


def _another(value: Tensor) -> Tensor:
    return torch.empty_like(value).requires_grad_(value.requires_grad)


@contextlib.contextmanager
def _uncounted() -> Iterator[None]:
    """A context in which of the modes around it only the fake tensors' is active."""
    (fake,) = (mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FakeTensorMode))
    with _disable_current_modes(), fake:
        yield


def _traced(function: Function, static: list[int]) -> Function:
    """`static` are the places of the weights, which are there anyway: the partitioner saves them for nothing."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def partition(joint: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
        options |= {"static_lifetime_input_indices": static, "compiler": "inductor"}
        return min_cut_rematerialization_partition(joint, inputs, **options)

    compilers = dict.fromkeys(("fw_compiler", "bw_compiler", "inference_compiler"), _runner)
    return aot_function(function, **compilers, partition_fn=partition, decompositions=select_decomp_table())


def _runner(module: GraphModule, _examples: Any) -> Function:
    """A graph as a function that stores what the compiled code would, and tells the meter its kernels."""
    nodes = list(module.graph.nodes)
    plan = Plan(nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]

    def run(values: list[Any]) -> Any:
        modes = _get_current_dispatch_mode_stack()
        ledger = next((mode for mode in modes if isinstance(mode, Ledger)), None)
        for mode in modes:
            if isinstance(mode, Meter):
                mode.kernels += plan.kernels
        results = dict(zip(inputs, values, strict=True))
        values.clear()
        for node in nodes[len(inputs) :]:
            args, kwargs = map_arg((node.args, node.kwargs), results.__getitem__)
            if node.op == "output":
                return args[0]
            with _uncounted():
                result = getattr(module, node.target) if node.op == "get_attr" else node.target(*args, **kwargs)
            results[node] = result
            stores = ledger is not None and node in plan.stored
            casts = stores and ledger.part(args) == "weights"
            del args, kwargs
            if stores and not _fusible(node):
                ledger.add(result, casts)
            for done in plan.done[node]:
                del results[done]
            if stores and _fusible(node):  # in the place of what it reads
                ledger.add(result, casts)
            del result
        raise AssertionError("a graph without output")

    run._boxed_call = True  # it takes its inputs from the caller's list, which keeps none
    return run


class Plan:
    """Of a graph: what is stored, its kernels, and what is needed no longer after each operation."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.base: dict[Node, Node] = {}  # a view's tensor
        for node in nodes:
            source = self.base[node.all_input_nodes[0]] if _is_view(node) and node.all_input_nodes else node
            self.base[node] = source if isinstance(_meta(source), Tensor) else node  # one of several results
        self.depth = self._depths()
        self.group = self._groups()
        self.cheap = self._cheap()
        self.stored = {self.base[node] for node in nodes if self._is_stored(node)}
        self.kernels = self._kernels()
        self.done = self._done()

    def _depths(self) -> dict[Node, int]:
        depth: dict[Node, int] = {}
        for node in self.nodes:
            depth[node] = max((depth[source] for source in node.all_input_nodes), default=0) + _alone(node)
        return depth

    def _groups(self) -> dict[Node, Node]:
        """Each fusible operation's kernel, named by one of its operations."""
        leader: dict[Node, Node] = {}

        def find(node: Node) -> Node:
            while leader[node] is not node:
                node = leader[node]
            return node

        readers: dict[Any, Node] = {}
        for node in self.nodes:
            if not _fusible(node):
                continue
            leader[node] = node
            if _over_rows(node):
                continue
            for source in {self.base[source] for source in node.all_input_nodes}:
                shared = (source, self.depth[node])
                if source in leader and self.depth[source] == self.depth[node] and not _over_rows(source):
                    leader[find(node)] = find(source)
                elif source not in leader and stored_bytes(_meta(source)) > 2**16 and shared in readers:
                    leader[find(node)] = find(readers[shared])
                readers.setdefault(shared, node)
        return {node: find(node) for node in leader}

    def _is_stored(self, node: Node) -> bool:
        """Whether a result is returned, or read by a kernel other than its own, which doesn't rather compute it."""
        base = self.base[node]
        if not _fusible(base):
            return True
        if any(user.op == "output" or _alone(user) for user in node.users):
            return True
        if base in self.cheap:
            return False
        return any(
            self.group[user] is not self.group[base] and not (_over_rows(user) and self.depth[user] == self.depth[base])
            for user in node.users
            if _fusible(user)
        )

    def _cheap(self) -> set[Node]:
        """The operations that depend on no reduction of their kernel: whoever reads their results computes them."""
        cheap: set[Node] = set()
        for node in self.nodes:
            sources = [self.base[source] for source in node.all_input_nodes]
            if _fusible(node) and not _reduces(node) and all(s in cheap or not _fusible(s) for s in sources):
                cheap.add(node)
        return cheap

    def _sources(self) -> dict[Node, dict[Node, int]]:
        """Of each operation the stored tensors that it reads, also through others that aren't stored, and the bytes."""
        sources: dict[Node, dict[Node, int]] = {}
        for node in filter(_fusible, self.nodes):
            sources[node] = {}
            for source in node.all_input_nodes:
                base = self.base[source]
                if base not in self.stored:
                    sources[node] |= sources[base]
                elif isinstance(_meta(base), Tensor):
                    sources[node][base] = min(stored_bytes(_meta(source)), stored_bytes(_meta(base)))
        return sources

    def _kernels(self) -> list[Kernel]:
        launched: list[Kernel] = []
        sources = self._sources()
        read: dict[Node, dict[Node, int]] = defaultdict(dict)
        written: dict[Node, int] = defaultdict(int)
        for node in self.nodes:
            if _alone(node):
                args, kwargs = map_arg((node.args, node.kwargs), _meta)
                launched += kernels(node.target, (args, kwargs), _meta(node), "fused")
            elif node in self.stored and _fusible(node):
                group = self.group[node]
                written[group] += stored_bytes(_meta(node))
                read[group] |= {s: n for s, n in sources[node].items() if self.group.get(s) is not group}
        return launched + [Kernel("fused", sum(read[group].values()) + size) for group, size in written.items()]

    def _done(self) -> dict[Node, list[Node]]:
        """The nodes that nobody needs after each one; what isn't stored is computed where it is read."""
        place = {node: number for number, node in enumerate(self.nodes)}
        end: dict[Node, int] = {}
        done = defaultdict(list)
        for node in reversed(self.nodes):
            read = [place[user] if user in self.stored or user.op == "output" else end[user] for user in node.users]
            end[node] = max(read, default=place[node])
            done[self.nodes[end[node]]].append(node)
        return done


def _meta(node: Node) -> Any:
    return node.meta.get("val")


def _called(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)


def _is_view(node: Node) -> bool:
    if node.op != "call_function":
        return False
    return not _called(node) or launches_nothing(node.target)  # not called: an item of a list of results


def _alone(node: Node) -> bool:
    return _called(node) and stands_alone(node.target)


def _fusible(node: Node) -> bool:
    return node.op == "call_function" and not _is_view(node) and not _alone(node)


def _reduces(node: Node) -> bool:
    return _called(node) and torch.Tag.reduction in node.target.tags


def _over_rows(node: Node) -> bool:
    """Whether an operation reduces another dimension than the last, or all."""
    if not _reduces(node):
        return False
    source, result = _meta(node.all_input_nodes[0]), _meta(node)
    return source.dim() > 1 and (result.numel() == 1 or result.shape[-1:] == source.shape[-1:])
