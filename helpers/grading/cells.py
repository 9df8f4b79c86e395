"""What is handed in: a notebook's cells, or a script's statements, in order."""

import ast
import contextlib
import json
import re
import symtable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SLOW = "slow"  # the tag of cells that grading passes over
LEAST = 40  # nodes of a syntax tree: definitions that are smaller may be equal by chance


@dataclass(frozen=True)
class Cell:
    """`place` is "cell 3", counted among the cells with code, or "line 12"."""

    place: str
    source: str

    @property
    def helps(self) -> bool:
        return self.place.startswith("line ") and self.source.startswith(("def ", "class ", "@"))

    @cached_property
    def names(self) -> set[str]:
        """The names that it defines or reads, outside of functions."""
        return {symbol.get_name() for symbol in symtable.symtable(self.source, self.place, "exec").get_symbols()}


@dataclass(frozen=True)
class Handed:
    """What of a file can run, and what of it can't be read."""

    cells: list[Cell]
    faults: list[str]

    def __contains__(self, name: str) -> bool:
        return self.last(name) is not None

    def last(self, name: str) -> int | None:
        """The place among the cells of the last one with this name: after it, an exercise is as it was checked last.

        Of a script's statements definitions that follow belong to it, as they may help.
        """
        place = max((at for at, cell in enumerate(self.cells) if name in cell.names), default=None)
        while place is not None and any(cell.helps for cell in self.cells[place + 1 : place + 2]):
            place += 1
        return place

    def text(self, name: str) -> str | None:
        """The last text that a cell gives this name, without running it."""
        found = None
        for statement in [statement for cell in self.cells for statement in ast.parse(cell.source).body]:
            if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == [name]:
                with contextlib.suppress(ValueError):
                    found = str(ast.literal_eval(statement.value))
        return found

    def normalised(self, name: str) -> str:
        """The last definition of a class or a function without what its author may call as they like; "" if small."""
        kinds = ast.ClassDef, ast.FunctionDef
        statements = [statement for cell in self.cells for statement in ast.parse(cell.source).body]
        definitions = [node for node in statements if isinstance(node, kinds) and node.name == name]
        nodes = list(ast.walk(definitions[-1])) if definitions else []
        if len(nodes) < LEAST:
            return ""
        own: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, kinds) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            if isinstance(getattr(node, "ctx", None), ast.Store) or isinstance(node, (*kinds, ast.arg)):
                called = [getattr(node, attribute, None) for attribute in ("id", "name", "attr", "arg")]
                own |= {word: str(len(own)) for word in called if isinstance(word, str) and word not in own}
        return re.sub(r"'(\w+)'", lambda word: own.get(word[1], word[0]), ast.dump(definitions[-1]))


def read(path: Path) -> Handed:
    """A file's cells that are Python; slow ones are left out, and IPython's own lines, such as %time and !pip."""
    cells: list[Cell] = []
    faults: list[str] = []
    try:
        sources = _sources(path.read_text(encoding="utf-8", errors="replace"), path.suffix == ".ipynb")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Handed(cells, [f"no notebook: {error}"])
    for place, source in sources.items():
        try:
            cells.append(Cell(place, _parsed(source)))
        except (SyntaxError, ValueError, RecursionError) as error:
            faults.append(f"{place}: {error}" if place else str(error))
    return Handed(cells if path.suffix == ".ipynb" else [part for cell in cells for part in _statements(cell)], faults)


def _sources(text: str, notebook: bool) -> dict[str, str]:
    if not notebook:
        return {"": text}
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    numbered = enumerate(cells, 1)
    kept = [(n, cell) for n, cell in numbered if SLOW not in cell.get("metadata", {}).get("tags", [])]
    return {f"cell {n}": "".join(cell["source"]) for n, cell in kept}


def _statements(script: Cell) -> list[Cell]:
    """Each statement of a script as a cell, so that one that fails costs no other."""
    return [Cell(f"line {each.lineno}", ast.unparse(each)) for each in ast.parse(script.source).body]


def _parsed(source: str) -> str:
    with contextlib.suppress(SyntaxError):
        return _compiled(source)
    return _compiled("\n".join("" if line.lstrip()[:1] in ("%", "!") else line for line in source.splitlines()))


def _compiled(source: str) -> str:
    symtable.symtable(source, "solution", "exec")  # sees what the parser doesn't, such as a return outside
    return source
