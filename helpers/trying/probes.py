"""What a cause of slowness could bring at most: the training without it, which isn't the same training any more.

They are tried in turns as changes are. Evaluation is no probe but counted in the profile: no turn is long enough to
hold its share of what happens rarely.

Without its output, nothing is drawn, logged or printed, nor computed for that alone: statements that only show
something are left out, then those whose results nothing reads any more, such as a network's pass for a picture, then
blocks and functions without a statement. What seems to train stays in any case.
"""

import ast
import gc
import io
import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from ..script import hooks, running
from ..script.stacks import is_library
from .change import OF_ALL, Change, Facts


class SameBatch(Change):
    """The first batch of the DataLoader again and again: input for nothing."""

    kind, name, share = "probe", "same-batch", 0.5
    parts = ("loader", "idle")

    def missing_because(self, facts: Facts) -> str:
        trained = any(loader["trains"] for loader in facts["loaders"].values())
        return "" if trained else "batches come from no DataLoader"

    def apply(self, facts: Facts) -> None:
        def again(iterate: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
            if not torch.is_grad_enabled():
                return iterate(loader)
            if not hasattr(loader, "_first"):
                loader._first = next(iterate(loader))
            return itertools.repeat(loader._first, len(loader))

        hooks.wrap({hooks.LOADER_BEGUN: again})


class NoOutput(Change):
    """Nothing printed, logged or drawn, nor computed for that alone."""

    kind, name = "probe", "no-output"
    parts = ("Python", "idle")

    def apply(self, facts: Facts) -> None:
        logging.disable(logging.CRITICAL)
        compiled = hooks.Point(running, "compiled")
        hooks.wrap({hooks.PRINT: _printed, hooks.SOURCE: _code, compiled: lambda _, script: _silent(script)})


def _code(get_code: Callable[..., Any], loader: Any, name: str) -> Any:
    path = loader.get_filename(name)
    return get_code(loader, name) if is_library(path) else _silent(path)


def _silent(script: str) -> CodeType:
    tree = without_output(Path(script).read_bytes())
    return compile(tree, os.path.abspath(script), "exec", dont_inherit=True)


def _printed(_print: Callable[..., None], *_: Any, file: Any = None, **__: Any) -> None:
    if isinstance(file, io.StringIO):  # text that the script reads back
        file.write("\n")


def _nothing(*_: Any, **__: Any) -> None:
    pass


class NoCollection(Change):
    """No garbage collection."""

    kind, name, share = "probe", "no-collection", 0.02
    parts = OF_ALL

    def apply(self, facts: Facts) -> None:
        gc.disable()
        hooks.wrap({hooks.COLLECT: _nothing})


class NoCheckpoint(Change):
    """Nothing saved."""

    kind, name, parts = "probe", "no-checkpoint", ()  # only where a finding says so

    def apply(self, facts: Facts) -> None:
        hooks.wrap({hooks.SAVE: _nothing})


PROBES = (SameBatch, NoOutput, NoCollection, NoCheckpoint)


LIBRARIES = re.compile(r"matplotlib|seaborn|plotly|imageio|wandb|mlflow|logging|loguru|tensorboardX?")
SHOWS = re.compile(
    r"print|save_?fig|save_image|im(save|write|show)|add_(scalars?|images?|histogram|figure|text)|set_postfix"
)
TRAINS = re.compile(r"\b\w*(train|epoch|step|backward|next|update|optimi|fit|run|loop|act|sample|push|pop)")


def without_output(source: str | bytes) -> ast.Module:
    """The script's syntax tree, from which it can be compiled; lines keep their numbers."""
    tree = ast.parse(source)
    shown, read = _libraries(tree), _reads(tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    trains = {each.name for each in functions if re.search(r"\.(step|backward)\(", ast.unparse(each))}
    while _leave_out(tree, shown, trains, read):
        pass
    return tree


def _leave_out(tree: ast.Module, shown: set[str], trains: set[str], before: Counter[str]) -> bool:
    """Leave out what shows, and what is needed for nothing by now; whether there was anything."""
    now = _reads(tree)

    def needless(target: ast.expr) -> bool:
        names = [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
        plain = isinstance(target, (ast.Name, ast.Tuple, ast.List))
        return plain and all(before[name] and not now[name] for name in names)

    def goes(statement: ast.stmt) -> bool:
        match statement:
            case ast.Expr(ast.Call(function)):
                whole = ast.unparse(function)
                root, name = re.match(r"\w*", whole)[0], whole.rpartition(".")[2]
                grown = _grown(statement)
                return root in shown or bool(SHOWS.fullmatch(name)) or (grown is not None and needless(grown))
            case ast.Assign(targets, value):
                pass
            case ast.AugAssign(target, _, value) | ast.AnnAssign(target, _, ast.expr() as value):
                targets = [target]
            case ast.With(_, [ast.Pass()]) | ast.For(_, _, [ast.Pass()], []) | ast.If(_, [ast.Pass()], []):
                return True
            case ast.FunctionDef(name, _, body) if all(map(_is_empty, body)):
                shown.add(name)
                return False
            case _:
                return False
        code = ast.unparse(value)
        return all(map(needless, targets)) and not TRAINS.search(code) and not trains & set(re.findall(r"\w+", code))

    found = False
    for node in ast.walk(tree):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list) and len(left := [each for each in block if not goes(each)]) < len(block):
                found, block[:] = True, left or [ast.Pass(lineno=block[0].lineno, col_offset=0)]
    return found


def _is_empty(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or isinstance(getattr(statement, "value", None), ast.Constant)


def _libraries(tree: ast.Module) -> set[str]:
    """Names of libraries that draw or log, and of what is made by their functions: `plt`, `fig`, `logger`."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(aliases):
                names |= {a.asname or a.name.partition(".")[0] for a in aliases if LIBRARIES.search(a.name)}
            case ast.ImportFrom(str(module), aliases) if LIBRARIES.search(module):
                names |= {a.asname or a.name for a in aliases}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets, ast.Call(function)) if re.match(r"\w*", ast.unparse(function))[0] in names:
                names |= {each.id for of in targets for each in ast.walk(of) if isinstance(each, ast.Name)}
    return names


def _grown(statement: ast.stmt) -> ast.expr | None:
    """The list that a statement only appends to."""
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name() as grown, "append" | "extend"))):
            return grown
    return None


def _reads(tree: ast.Module) -> Counter[str]:
    """How often each name is read, but for appending to it."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    grown = {id(of) for node in ast.walk(tree) if isinstance(node, ast.stmt) and (of := _grown(node))}
    return Counter(node.id for node in names if id(node) not in grown)
