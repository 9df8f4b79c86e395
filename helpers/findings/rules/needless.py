"""Needless work: evaluation that records a graph, results that no backward pass reaches, constants rebuilt in every
step, one input multiplied by three weights in turn, products with one-hot vectors or diagonal matrices, and what a loop
computes one by one.

An op that records a graph carries the sequence number of the autograd node that it makes, and so does the node's
backward. So a trace shows which nodes never ran backward. Only products and convolutions are reported: other unused
ops, such as a metric's softmax in grad mode, cost little.

A trace names no tensors, so data flow is inferred from order and shapes, where no graph was noted beside it. A chain of
ops counts as constant if it begins with a constructor (ones, full, arange, …), every later input has as many elements
as a tensor that the chain has made, no op in it records a gradient, and it holds an op typical of masks or tables
(triu, tril, sin, cos, exp, pow). It is reported if every step builds the same chain.
"""

import ast
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from math import ceil, prod
from statistics import median
from typing import Any

from ...faults import remedy
from ..account import IDLE, length, of, union
from ..scene import SEVERAL, Scene, totals
from ..source_places import by_source_line, line_or_function, others, source_line, source_lines, user_calls, user_frame
from ..summary import ESTIMATE, MEASURED, Finding
from ..trace import ANNOTATION, BACKWARD, OP, OPTIMIZER, Event, Note, Trace, aten
from .products import MATRICES, between

_HEAVY = tuple(aten("addmm mm bmm baddbmm convolution _scaled_dot_product mkldnn_rnn"))
_MULTIPLIES = aten("matmul mm bmm linear einsum")
_ONE_HOT, _DIAGONAL = "one-hot product", "product with a diagonal matrix"
_SPARSE = dict.fromkeys(aten("one_hot"), _ONE_HOT) | dict.fromkeys(aten("diag diag_embed diagflat"), _DIAGONAL)
_FACTORS = {_ONE_HOT: "one-hot vectors of {:,} numbers", _DIAGONAL: "a diagonal matrix of {:,} rows"}
MOST_UNUSED = 8  # rows of a table for each id of a batch
_LOSSES = aten("cross_entropy_loss nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy")
_LOSSES |= aten("binary_cross_entropy_with_logits ctc_loss")
VOCABULARY, _HALVES, _TO_FP32 = 8192, ("c10::BFloat16", "c10::Half"), "6"  # torch's number of the type
LEAST_PASSES, SHORT_US = 4, 100  # of a loop; of an operator on a CPU, above which calls are little of its time
_CONSTRUCTORS = aten("ones zeros full arange eye linspace tril_indices triu_indices")
_SHAPING = aten("triu tril triu_ tril_ sin cos exp pow")
_PURE = _SHAPING | aten(
    "mul div add sub rsub neg reciprocal outer eq ne lt gt le ge logical_not bitwise_not masked_fill masked_fill_ to "
    "view reshape unsqueeze squeeze expand transpose t permute numpy_T contiguous mul_ div_ neg_ exp_ fill_"
)
VIEWS = aten(
    "view reshape transpose permute contiguous chunk split unbind unflatten unsqueeze squeeze flatten select slice t "
    "to rearrange movedim swapaxes _unsafe_view"
)


def kept_graph(trace: Trace) -> Iterator[Note]:
    """Notes on forward passes that recorded a graph of which nothing ran backward: they cost memory, not time."""
    regions: dict[str, list[list[Event]]] = {}
    for stretch in _stretches(trace):
        if not _any_ran(trace, stretch):
            heavy = [op for op in stretch if _is_heavy(op)]
            if heavy:
                scope = heavy[0].scope
                named = scope is not None and "#" not in scope.name
                regions.setdefault(scope.name if named else source_lines(trace, heavy[:1]), []).append(stretch)
    for where, stretches in regions.items():
        recorded = sum(map(len, stretches)) / len(trace.steps)
        text = f"{where}: {recorded:.4g} ops a step record a graph that no backward pass reads"
        yield Note(name := "graph kept in evaluation", f"{name}: {text}, and keep their activations; {remedy(name)}")


def unused_results(scene: Scene) -> Iterator[Finding]:
    """A product that the backward pass did not reach, though it ran: the loss doesn't depend on its result."""
    trace = scene.trace
    heavy = [op for ops in _stretches(trace) if _any_ran(trace, ops) for op in ops if _is_heavy(op)]
    unused = [op for op in heavy if not _any_ran(trace, [op])]
    if unused:
        evidence = f"{scene.each(len(unused), 'product')} whose backward never ran"
        yield scene.finding("result never used", scene.work(unused), scene.where(unused), evidence, MEASURED)


def _stretches(trace: Trace) -> list[list[Event]]:
    """The ops that made nodes, cut where a step, a backward pass or an annotation (loader, …) begins or ends.

    None where an optimizer steps and no backward pass is recorded: it ran in a thread or a time that wasn't.
    """
    if not trace.executed and any(e.name.startswith(OPTIMIZER) for e in trace.annotations):
        return []
    cutting = [e for e in trace.host if e.name.startswith(BACKWARD) or (e.kind, e.track) == (ANNOTATION, trace.thread)]
    # On a GPU the backward pass runs in a thread of its own while this one waits.
    cuts = sorted([e.begin for e in cutting] + [e.end for e in cutting if e.track == trace.thread])
    stretches: dict[int, list[Event]] = {}
    for op in dict.fromkeys(trace.makers.values()):
        if op.kind == OP and trace.step_of(op) is not None:
            stretches.setdefault(bisect_right(cuts, op.begin), []).append(op)
    return list(stretches.values())


def _any_ran(trace: Trace, stretch: list[Event]) -> bool:
    return any(number in trace.executed for op in stretch for number in trace.nodes(op))


def _is_heavy(op: Event) -> bool:
    return op.name.startswith(_HEAVY)


def products_by_line(trace: Trace) -> dict[str, float]:
    """The share of products and convolutions in the time of a source line's ops, by "train.py:7"."""
    times: Any = Counter()
    heavy: Any = Counter()
    for op in outermost(trace):
        line = line_or_function(trace, op)
        times[line] += op.us
        heavy[line] += length(of([e for e in (op, *op.inner()) if _is_heavy(e) or "Compiled" in e.name]))
    return {line: heavy[line] / time for line, time in times.items() if time}


def constant_work(scene: Scene) -> Iterator[Finding]:
    """Masks and tables of positions that are rebuilt in each step though they don't change."""
    trace = scene.trace
    if len(trace.steps) < 2:
        return
    built: dict[tuple, dict[int, list[list[Event]]]] = defaultdict(lambda: defaultdict(list))
    for chain in _constant_chains(trace):
        made = tuple((op.name, str(op.dims), str(op.values)) for op in chain)
        built[(source_line(trace, chain[0]), made)][trace.step_of(chain[0])].append(chain)
    everywhere = [steps for steps in built.values() if len(steps) == len(trace.steps)]
    chains = [chain for steps in everywhere for of_step in steps.values() for chain in of_step]
    if not chains:
        return
    longest = max(chains, key=lambda chain: sum(op.us for op in chain))
    names = list(dict.fromkeys(op.name.removeprefix("aten::") for op in longest))
    lines = len(by_source_line(trace, [chain[0] for chain in chains]))
    work, where = scene.work([op for chain in chains for op in chain]), source_lines(trace, longest[:1]) + others(lines)
    evidence = f"built anew {scene.per_step(len(chains)):.4g} times a step: {' → '.join(names)}"
    yield scene.finding("repeated constant work", work, where, evidence, MEASURED, of_host=True)


def _constant_chains(trace: Trace) -> Iterator[list[Event]]:
    """Runs of outermost ops, in the loop's thread, whose inputs are constants or made within the run."""
    chain: list[Event] = []
    sizes = {1}  # numbers of elements that the chain has made
    recording = set(trace.makers.values())
    for op in [*outermost(trace), None]:
        inputs = [_elements(dims) for dims in op.dims if isinstance(dims, list) and dims] if op else []
        if op and op.name in _CONSTRUCTORS:
            sizes.add(_elements(_constructed_shape(op)))
            chain.append(op)
        elif chain and inputs and op.name in _PURE and op not in recording and sizes.issuperset(inputs):
            sizes |= {*inputs, prod(inputs)}  # of an outer product
            chain.append(op)
        else:
            if any(op.name in _SHAPING for op in chain):
                yield chain
            chain, sizes = [], {1}


def _elements(dims: list[int]) -> int:
    """Of a tensor; -1, which nothing has, for a list of tensors."""
    return prod(dims) if all(isinstance(d, int) for d in dims) else -1


def outermost(trace: Trace) -> list[Event]:
    """The ops of the forward pass, in the loop's thread, that no other op contains."""
    forward = [op for op in trace.ops if op.track == trace.thread and op.backward is None]
    return [op for op in forward if not any(outer.kind == OP for outer in op.outer())]


def _constructed_shape(op: Event) -> list[int]:
    """The shape that a constructor makes, from its arguments."""
    numbers = []
    for value in op.values:
        try:
            numbers.append(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            break
    if numbers and isinstance(numbers[0], list):
        return numbers[0]
    if op.name == "aten::arange":  # (end, …), (start, end, …) or (start, end, step, …), and four options
        bounds = numbers[: max(len(op.values) - 4, 1)]
        begin, end, by = {1: [0, *bounds, 1], 2: [*bounds, 1], 3: bounds}.get(len(bounds), [0, 0, 1])
        return [max(0, ceil((end - begin) / by))]
    return [int(numbers[0])] * 2 if op.name == "aten::eye" and numbers else []


def separate_projections(scene: Scene) -> Iterator[Finding]:
    """Three or more Linear layers in a row with inputs of one shape and nothing but views between them: Q, K and V.

    Consecutive linear layers of one input shape are taken to share their input: chained with nothing between them they
    would be one layer.
    """
    trace = scene.trace
    rows: list[list[Event]] = []
    row: list[Event] = []
    for op in outermost(trace):
        linear = op.name == "aten::linear" and op.shape and len(op.dims) > 1 and op.dims[1]
        if linear and row and op.shape == row[-1].shape and user_frame(op) is user_frame(row[-1]):
            row.append(op)
        elif op.name not in VIEWS:
            row = [op] if linear else []
            rows.append(row)
    rows = [row for row in rows if len(row) >= 3]
    if rows:
        linears = [op for r in rows for op in r]
        work, saved = scene.products(trace.with_backward(linears)), _saved_share(rows[0])
        evidence = f"{scene.each(len(linears), 'product')}; one product would read the input once"
        yield scene.finding("separate projections of one input", work, scene.where(linears), evidence, ESTIMATE, saved)


def sparse_products(scene: Scene) -> Iterator[Finding]:
    """Rows of a table by a product with one-hot vectors, or rows scaled by one with a diagonal matrix.

    A diagonal matrix may be multiplied twice, from both sides of a matrix of its size.
    """
    trace, found = scene.trace, defaultdict(list)
    row: list[Event] = []
    again = False
    for op in outermost(trace):
        if op.name in _SPARSE:
            row, again = [op], False
        elif row and op.name in _MULTIPLIES and op.shape and user_frame(op) is user_frame(row[0]):
            kind, size = _SPARSE[row[0].name], 2 * row[0].shape[-1:]
            square = all(dims == size for dims in op.dims if dims)
            if kind == _ONE_HOT or square or (not again and size in [dims[-2:] for dims in op.dims]):
                found[kind].append([*row, op])
            again = kind == _DIAGONAL and square
            row = row if again else []
        elif op.name in VIEWS and row:
            row.append(op)
        else:
            row = []
    for kind, rows in found.items():
        work = scene.work(trace.with_backward([op for row in rows for op in row]))
        where = scene.where([row[0] for row in rows])  # a call, whose line is known
        evidence = f"{scene.each(len(rows), 'product')} with {_FACTORS[kind].format(rows[0][-1].shape[-1])}"
        yield scene.finding(kind, work, where, evidence, ESTIMATE, factor=0.95)


def dense_gradients(scene: Scene) -> Iterator[Finding]:
    """Gradients of embeddings as large as the table, of which a batch's few rows aren't zero, and their update."""
    trace, looked_up = scene.trace, {}
    for op in (op for op in trace.ops if op.name == "aten::embedding_dense_backward"):
        if len(op.dims) > 1 and len(op.values) > 2 and int(op.values[2]) >= MOST_UNUSED * _elements(op.dims[1]):
            looked_up[op] = int(op.values[2]), _elements(op.dims[1])
    if looked_up:
        rows, used = (sum(counts) / len(looked_up) for counts in zip(*looked_up.values(), strict=True))
        tables = [[table] for table, _ in looked_up.values()]
        updates = [op for op in trace.ops if op.shape[:1] in tables and trace.in_update(op)]
        evidence = f"{scene.each(len(looked_up), 'gradient')} of {rows:,.0f} rows, of which a batch reads {used:,.0f}"
        work = scene.work([*looked_up]) if scene.account else (SEVERAL, of([*looked_up, *updates]))
        where, saved = scene.where([*looked_up]), 1 - used / rows
        yield scene.finding("dense embedding gradients", work, where, evidence, ESTIMATE, saved)


def cast_logits(scene: Scene) -> Iterator[Finding]:
    """The 16-bit result of a product with a large vocabulary as a whole in fp32, and its gradient back again."""
    trace = scene.trace
    widths = [op.dims[MATRICES[op.name][1]][-1:] for op in trace.ops if op.name in MATRICES and op.dims]
    casts = [op for op in trace.ops if op.name == "aten::_to_copy" and op.backward is None and op.shape]
    casts = [op for op in casts if op.shape[-1] >= VOCABULARY and op.types[0] in _HALVES and _TO_FP32 in op.values[1:2]]
    casts = [op for op in casts if op.shape[-1:] in widths]
    if casts:
        work = scene.work(trace.with_backward(casts))
        largest = max((op.shape for op in casts), key=prod)
        evidence = f"{' × '.join(f'{size:,}' for size in largest)} numbers are copied to fp32, "
        evidence += f"{4 * prod(largest) / 2**20:,.0f} MiB, {scene.time(work[1])} forward and backward"
        yield scene.finding("logits in fp32", work, scene.where(casts), evidence, ESTIMATE)


def one_by_one(scene: Scene) -> Iterator[Finding]:
    """Products with weights of equal shapes, or losses, in a loop of which no pass needs another one's result.

    On a CPU only those of short operators: of long ones the calls are little of the time.
    """
    trace = scene.trace
    products = [op for op in trace.ops if op.name in MATRICES and op.backward is None]
    losses = [op for op in outermost(trace) if op.name in _LOSSES]
    for name, ops in (("products one by one", products), ("losses one by one", losses)):
        loops: list[tuple[str, int, list[Event]]] = []
        for line, members in _unrelated(trace, ops):
            first, last = members[0], members[-1]
            inside = [first, *between(trace, first, last), last]
            foreign = sum(first.begin < op.begin < last.begin for op in products) - (ops is products) * len(members)
            short = scene.account is not None or median(op.us for op in inside) < SHORT_US
            if short and foreign <= len(members) / 8:  # else what is between is another loop's, or a recurrence
                loops.append((line, len(members), inside))
        if not loops:
            continue
        whole = [(inside[0].begin, inside[-1].end) for *_, inside in loops]  # with the Python between
        spans = union(whole + of(trace.with_backward([op for *_, inside in loops for op in inside])))
        lines = totals((line, inside[-1].end - inside[0].begin) for line, _, inside in loops)
        count = sum(members for _, members, _ in loops)
        evidence = f"{count / len(loops):.3g} in a loop, {scene.per_step(count):.4g} a step, none of which needs "
        evidence += f"another one's result; with what is between {scene.time(spans)} forward and backward"
        work = (SEVERAL, spans) if scene.account is None else (IDLE, scene.idle(spans))
        where, saved = lines[0][0] + others(len(lines)), 1 - len(loops) / count
        yield scene.finding(name, work, where, evidence, ESTIMATE, saved)


def _unrelated(trace: Trace, ops: list[Event]) -> Iterator[tuple[str, list[Event]]]:
    """Ops of one line in one call of a user's function, of which no one goes back through another, and that line.

    The innermost such line; what a graph doesn't hold, as no backward pass went through it, is none.
    """
    groups: dict[Any, dict[int, Event]] = defaultdict(dict)
    passes: dict[Any, set[Event]] = defaultdict(set)
    graphs = [{node: inner for node, *inner in graph} for graph in trace.about.get("settings", {}).get("graphs", [])]
    for op in ops:
        shape = str(op.dims[MATRICES[op.name][1]]) if op.name in MATRICES and op.dims else op.name
        node = max(trace.nodes(op), default=-1)
        number = next((number for number, graph in enumerate(graphs) if node in graph), -1)
        for frame, line, called in user_calls(op) if number >= 0 else ():
            passes[-frame.begin, line, number].add(called)
            groups[-frame.begin, line, number, shape][node] = op
    taken: set[Event] = set()
    lines: dict[Any, list[Event]] = defaultdict(list)
    for (begin, line, number, _), members in sorted(groups.items()):
        least = LEAST_PASSES if line else 2 * LEAST_PASSES
        for level in _levels(members, graphs[number]) if len(passes[begin, line, number]) >= least else ():
            if len(level) >= least and taken.isdisjoint(level):
                lines[begin, line] += level
                taken.update(level)
    for (_, line), related in lines.items():
        yield line or source_line(trace, related[0]), sorted(related, key=lambda op: op.begin)


def _levels(members: Mapping[int, Event], graph: Mapping[int, list[int]]) -> list[list[Event]]:
    """Members that have the same number of others behind them: so none goes back through another one."""
    behind: dict[int, int] = {}
    levels = defaultdict(list)
    for node in sorted(graph):  # what it goes on to was made before it
        behind[node] = max((behind.get(inner, 0) for inner in graph[node]), default=0)
        if node in members:
            levels[behind[node]].append(members[node])
            behind[node] += 1
    return list(levels.values())


def _saved_share(row: list[Event]) -> float:
    """The share of a row's memory traffic that one joint product would save: input (m, k), weights (n, k)."""
    *rows, k = row[0].shape
    m = prod(rows)
    traffic = sum(m * k + k * op.dims[1][0] + m * op.dims[1][0] for op in row)
    return (len(row) - 1) * m * k / traffic


RULES = (unused_results,)
DETAILED_RULES = (constant_work, separate_projections, sparse_products, dense_gradients, cast_logits, one_by_one)
