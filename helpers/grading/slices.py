"""What of a notebook or a script an exercise needs: its definition, and what that uses.

Cells that measure or draw don't run, so that grading takes seconds. A name stands for its last definition above the
exercise's, with what changes it afterwards: `A |= …`, `A.x = …`, `A.append(…)`.
"""

import ast
import contextlib
import json
import symtable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass
class Slices:
    """The statements of a file in order, and what of it can't be read."""

    statements: list[ast.stmt]
    faults: list[str]

    @classmethod
    def of(cls, path: Path) -> "Slices":
        read = cls([], [])
        try:
            sources = _sources(path)
        except (ValueError, KeyError, TypeError) as error:
            read.faults.append(f"no notebook: {error}")
            return read
        for number, source in enumerate(sources, 1):
            try:
                read.statements += _parsed(source)
            except (SyntaxError, ValueError, RecursionError) as error:
                read.faults.append(f"cell {number}: {error}" if path.suffix == ".ipynb" else str(error))
        return read

    def __contains__(self, name: str) -> bool:
        return any(name in names for names in self._bound)

    def source(self, name: str) -> str:
        """The statements that define `name`, as a script of their own."""
        above = max(place for place, names in enumerate(self._bound) if name in names)
        chosen: set[int] = set()
        todo = [name]
        known = {name}
        while todo:
            for place in self._definition(todo.pop(), above):
                if place not in chosen:
                    chosen.add(place)
                    more = _used(self.statements[place]) - known
                    known |= more
                    todo += more
        body = [self.statements[place] for place in sorted(chosen)]
        return ast.unparse(ast.Module(body, type_ignores=[]))

    @cached_property
    def _bound(self) -> list[set[str]]:
        return [_bound(statement) for statement in self.statements]

    def _definition(self, name: str, above: int) -> list[int]:
        places = [at for at, names in enumerate(self._bound) if name in names]
        places = [at for at in places if at <= above] or places
        new = max((at for at in places if not _changes(self.statements[at])), default=-1)
        if new >= 0 and isinstance(self.statements[new], (ast.Import, ast.ImportFrom)):
            places = [new]  # what is called in a module doesn't change it
        return [at for at in places if at >= new] + [at for at, names in enumerate(self._bound) if "*" in names]


def _sources(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".ipynb":
        return [text]
    return ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]


def _parsed(source: str) -> list[ast.stmt]:
    """The statements of a source; IPython's own lines, such as %time and !pip, are left out."""
    with contextlib.suppress(SyntaxError):
        symtable.symtable(source, "solution", "exec")  # sees what the parser doesn't, such as a return outside
        return ast.parse(source).body
    source = "\n".join("" if line.lstrip()[:1] in ("%", "!") else line for line in source.splitlines())
    symtable.symtable(source, "solution", "exec")
    return ast.parse(source).body


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement defines or changes."""
    if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
        return {"*"}
    if changed := _changes(statement):
        return changed
    table = symtable.symtable(ast.unparse(statement), "solution", "exec")
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}


def _changes(statement: ast.stmt) -> set[str]:
    """The names that a statement changes without a new definition."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.AugAssign):
        targets = [statement.target]
    elif isinstance(statement, ast.Assign):
        targets = [target for target in statement.targets if isinstance(target, (ast.Attribute, ast.Subscript))]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        targets = [statement.value.func] if isinstance(statement.value.func, ast.Attribute) else []
    names = set()
    for target in targets:
        while isinstance(target, (ast.Attribute, ast.Subscript)):
            target = target.value
        if isinstance(target, ast.Name):
            names.add(target.id)
    return names


def _used(statement: ast.stmt) -> set[str]:
    """The global names that a statement reads, in its functions too."""
    tables = [symtable.symtable(ast.unparse(statement), "solution", "exec")]
    names: set[str] = set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        whole = table.get_type() == "module"
        names |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (whole or s.is_global())}
    return names
