"""Source without its answers: a notebook's cell cut to stubs, and a module whose pieces its reader supplies."""

import ast
import re
from collections.abc import Collection, Iterator, Mapping

Definition = ast.ClassDef | ast.FunctionDef
DEFINITIONS = ast.ClassDef, ast.FunctionDef
LAID_OUT = "torch.autograd.Function", "IterableDataset"  # classes whose instances another base's can't become
YOURS = "raise NotImplementedError  # your code"


def stubs(source: str, names: Collection[str], used: Collection[str]) -> list[str]:
    """Of a cell's definitions those with these names, each a signature and a docstring, below its imports.

    Others stay as they are where cells without an answer have `used` them.
    """
    body = ast.parse(source).body
    parts = ["\n".join(ast.unparse(node) for node in body if isinstance(node, (ast.Import, ast.ImportFrom)))]
    for node in body:
        if isinstance(node, DEFINITIONS) and node.name in names:
            parts.append(_emptied(node))
        elif isinstance(node, DEFINITIONS) and node.name in used:
            parts.append(ast.get_source_segment(source, node))
    return [part for part in parts if part]


def _emptied(node: Definition) -> str:
    if isinstance(node, ast.FunctionDef):
        node.body = [*_docstring(node), ast.Expr(ast.Name("YOURS"))]
    else:
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
        for part in methods:
            part.body = [*_docstring(part), ast.Expr(ast.Name("YOURS"))]
        node.body = [*_docstring(node), *methods]
    return ast.unparse(node).replace("YOURS", YOURS)


def _docstring(node: Definition) -> list[ast.stmt]:
    return node.body[:1] if ast.get_docstring(node) is not None else []


def without_pieces(source: str, exercises: Mapping[str, str], depth: int) -> str:
    """A module whose pieces are cut; `exercises` names by piece the one that asks for it.

    What only the pieces have used goes with them, as far as it is private. `depth` is how many folders the module lies
    below the package.
    """
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    kept = [node for node in tree.body if _name(node) not in exercises]
    needed = _reached(kept)
    for node in reversed(tree.body):
        name, begin = _name(node), min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        if name in exercises:
            lines[begin - 1 : node.end_lineno] = [f'@cut("{exercises[name]}")\n', *_stub(node, lines)]
        elif (helped := _helps(node)) and helped not in needed:
            del lines[begin - 1 : node.end_lineno]
    last = max((node.end_lineno for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))), default=0)
    lines.insert(last, f"from {'.' * (depth + 1)}pieces import cut\n")
    return re.sub(r"\n{4,}", "\n\n\n", "".join(lines)).rstrip() + "\n"


def _stub(node: Definition, lines: list[str]) -> Iterator[str]:
    """The lines of a definition up to its docstring; of a class's bases only what decides how it is laid out."""
    if isinstance(node, ast.ClassDef):
        bases = [base for base in map(ast.unparse, node.bases) if base.startswith(LAID_OUT)]
        yield f"class {node.name}{f'({bases[0]})' if bases else ''}:\n"
    else:
        yield from lines[node.lineno - 1 : node.body[0].lineno - 1]
    yield from lines[node.body[0].lineno - 1 : node.body[0].end_lineno] if _docstring(node) else ["    ...\n"]


def _name(node: ast.stmt) -> str:
    """What a statement at top level defines; "" if that isn't one name."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return getattr(node, "name", "") if isinstance(node, DEFINITIONS) else ""


def _helps(node: ast.stmt) -> str:
    """The private name that a statement defines, or tells more about as `@_name.register` does; "" if neither."""
    name = _name(node)
    if name in ("", "_"):
        calls = [node.value] if isinstance(node, ast.Expr) else getattr(node, "decorator_list", [])
        name = ast.unparse(calls[0]).partition(".")[0] if calls else ""
    return name if name.startswith("_") else ""


def _reached(nodes: list[ast.stmt]) -> set[str]:
    """The names that statements use which aren't private, and those that these use in turn."""
    uses = {
        id(node): {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} - {_name(node)} for node in nodes
    }
    reached: set[str] = set()
    more = [node for node in nodes if not _helps(node)]
    while more:
        reached |= set().union(*(uses.pop(id(node)) for node in more))
        more = [node for node in nodes if id(node) in uses and _helps(node) in reached]
    return reached
