"""What the source of a user's function tells and no stack does: its loops, what a line makes for others, what pads."""

import ast
import functools
import linecache
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from types import CodeType

_BODIES = ("body", "orelse", "handlers", "finalbody")
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FILLS = {"append", "extend", "add", "push", "put", "store", "insert"}  # methods that give their object something
_PADS, _NEW = {"pad"}, {"zeros", "ones", "full", "new_zeros", "new_full"}
Path = list[tuple[ast.AST, list[ast.AST]]]  # a statement and those of its block, the outermost first


@functools.cache
def _module(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _holds(node: ast.AST, lines: Collection[int]) -> bool:
    first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", 0) or 0
    return any(first <= line <= last for line in lines)


def _path(file: str, line: int) -> Path:
    """The statements of one function, or of the file, that a line is in."""
    path: Path = []
    node: ast.AST | None = _module(file)
    while node is not None:
        blocks = [getattr(node, name, []) for name in _BODIES]
        node, block = next(((each, block) for block in blocks for each in block if _holds(each, [line])), (None, []))
        path = [] if isinstance(node, _SCOPES) else [*path, (node, block)] if node else path
    return path


def _other_loops(path: Path, ordinary: Collection[int]) -> list[ast.AST]:
    """The loops that hold none of these lines; a generator's loop, which goes on when it is asked, is none."""
    loops = [node for node, _ in path if isinstance(node, _LOOPS) and not _holds(node, ordinary)]
    return [loop for loop in loops if not any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in ast.walk(loop))]


def is_repeated(file: str, line: int, ordinary: Collection[int]) -> bool:
    """Whether a line is in a loop of its function that holds none of the `ordinary` lines."""
    return bool(_other_loops(_path(file, line), ordinary))


def body_of(file: str, line: int) -> range:
    """The lines in the loop whose head a line is; none of another line."""
    last, _ = (_path(file, line) or [(None, [])])[-1]
    if not isinstance(last, _LOOPS) or last.lineno != line:
        return range(0)
    return range(last.body[0].lineno, last.body[-1].end_lineno + 1)


def repeats(file: str, line: int) -> bool:
    """Whether a line does in a comprehension what it does."""
    return any(isinstance(node, _COMPREHENSIONS) for last, _ in _path(file, line)[-1:] for node in ast.walk(last))


def makes_for(file: str, line: int, ordinary: Collection[int]) -> bool:
    """Whether the `ordinary` lines of a function read what a line of it makes, or what is made from that."""
    path, methods = _path(file, line), _methods(file, line)
    makers = [*_other_loops(path, ordinary), *(node for node, _ in path[-1:])]
    made = _made(makers[0]) | _in_methods(makers[0], methods, _made) if makers else set()
    for node, block in reversed(path):
        at = block.index(node)
        for other in block[at + 1 :] + block[:at]:
            makes = _made(other) | _in_methods(other, methods, _made)
            if made & ((_read(other) | _in_methods(other, methods, _read)) - makes):
                if _holds(other, ordinary):
                    return True
                made |= makes
    return False


def _methods(file: str, line: int) -> dict[str, ast.AST]:
    """The methods of the class that a line is in, as they are called."""
    classes = [node for node in ast.walk(_module(file)) if isinstance(node, ast.ClassDef) and _holds(node, [line])]
    functions = [node for each in classes[-1:] for node in each.body if isinstance(node, _SCOPES[:2])]
    return {f"self.{function.name}": function for function in functions}


def _in_methods(node: ast.AST, methods: dict[str, ast.AST], names: Callable[[ast.AST], set[str]]) -> set[str]:
    """What methods that an object's statement calls read or make of the object, also by `buffer = self.buffer`."""
    calls = {ast.unparse(inner.func) for inner in ast.walk(node) if isinstance(inner, ast.Call)}
    found = set()
    for function in (methods[call] for call in calls & methods.keys()):
        assigned = [each for each in ast.walk(function) if isinstance(each, ast.Assign)]
        short = {ast.unparse(each.targets[0]): ast.unparse(each.value) for each in assigned}
        for head, *parts in (name.split(".") for name in names(function)):
            parts = [*short.get(head, head).split("."), *parts]
            found |= {".".join(parts[:end]) for end in range(2, len(parts) + 1) if parts[0] == "self"}
    return found


def _made(node: ast.AST) -> set[str]:
    """The variables that a statement assigns or fills, but for those of its loops."""
    loops = [inner for inner in ast.walk(node) if isinstance(inner, ast.For | ast.AsyncFor | ast.comprehension)]
    counted = {ast.unparse(name) for loop in loops for name in ast.walk(loop.target) if isinstance(name, ast.Name)}
    return {ast.unparse(target) for inner in ast.walk(node) for target in _targets(inner)} - counted


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        yield node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FILLS:
        yield node.func.value


def _read(node: ast.AST) -> set[str]:
    names = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name | ast.Attribute))
    return {ast.unparse(name) for name in names if isinstance(name.ctx, ast.Load)}


def padding_line(code: CodeType) -> int:
    """The line of a function that sets the width which rows are padded to, or else that pads them; 0 if none does."""
    nodes = [node for node in ast.walk(_function(code)) if isinstance(node, ast.expr | ast.Assign)]
    by_name = [call for names in (_PADS, _NEW) for call in nodes if _name(call) in names]
    products = [node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)]
    by_list = [product for product in products if isinstance(product.left, ast.List)]
    for pads in (*_asked_to_pad(nodes), *by_name, *by_list):
        sizes = {name for size in _sizes(pads) for name in _names(size)}
        before = [node for node in nodes if isinstance(node, ast.Assign) and node.lineno <= pads.lineno]
        return max((node.lineno for node in before if sizes & {*map(ast.unparse, node.targets)}), default=pads.lineno)
    return 0


def padding_in(file: str) -> int:
    """The line of a file that asks for padding, wherever it is; 0 if none does."""
    return next((call.lineno for call in _asked_to_pad(ast.walk(_module(file)))), 0)


def _asked_to_pad(nodes: Iterable[ast.AST]) -> list[ast.Call]:
    """`tokenizer(…, padding="max_length")`, `pad_sequence(…)`; a convolution's padding is something else."""
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    others = [call for call in calls if not re.search("conv|pool", _name(call), re.IGNORECASE)]
    options = {call: [each.arg for each in call.keywords] for call in others}
    return [call for call in others if "padding" in options[call] or _name(call) == "pad_sequence"]


def _function(code: CodeType) -> ast.AST:
    """Where a function is defined; of two lambdas in a line both."""
    functions = [node for node in ast.walk(_module(code.co_filename)) if isinstance(node, (*_SCOPES[:2], ast.Lambda))]
    for function in functions:
        above = [function, *getattr(function, "decorator_list", [])]
        if min(node.lineno for node in above) == code.co_firstlineno:
            return function
    return ast.Module([], [])


def _name(node: ast.AST) -> str:
    """What a call calls."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _sizes(node: ast.AST) -> list[ast.expr]:
    """Where the width stands: in a list's factor, after what is padded, or in all of a new tensor's size."""
    if isinstance(node, ast.BinOp):
        return [node.right]
    return node.args[_name(node) in _PADS :] if isinstance(node, ast.Call) and _name(node) in _PADS | _NEW else []


def _names(size: ast.AST) -> Iterator[str]:
    """The variables in a size, but for those of calls in it, which are of the rows themselves."""
    if isinstance(size, ast.Name):
        yield size.id
    for inner in ast.iter_child_nodes(size) if isinstance(size, ast.Tuple | ast.List | ast.BinOp) else ():
        yield from _names(inner)
