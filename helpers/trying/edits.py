"""Edits of the user's source: keywords of a call, lines before a statement or at the top, variables of the shell.

They are made on the text, at positions that Python's parser gives, so that comments and layout stay.
"""

import ast
import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Site = tuple[str, int]  # a file and a line, or 0 for wherever in it


@dataclass(frozen=True)
class Keywords:
    """Give a call at this line these keywords; `callee` is the end of its function's name."""

    site: Site
    callee: str
    values: Mapping[str, str]

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.values.items())
        return f"{_place(self.site)} {self.callee}(…, {values})"

    def changed(self, text: str) -> str:
        call = _call(text, self.site, self.callee)
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        places = [(*_span(text, given[name]), value) for name, value in self.values.items() if name in given]
        if new := ", ".join(f"{name}={value}" for name, value in self.values.items() if name not in given):
            last = _span(text, call)[1] - 1
            comma = "" if text[:last].rstrip().endswith(("(", ",")) else ", "
            places.append((last, last, comma + new))
        for start, end, value in sorted(places, reverse=True):
            text = text[:start] + value + text[end:]
        return text


@dataclass(frozen=True)
class Call:
    """Replace a call at this line; `{}` in the code stands for its function."""

    site: Site
    callee: str
    code: str

    def __str__(self) -> str:
        return f"{_place(self.site)} {self.code.format(self.callee)}"

    def changed(self, text: str) -> str:
        call = _call(text, self.site, self.callee)
        start, end = _span(text, call)
        return text[:start] + self.code.format(text[slice(*_span(text, call.func))]) + text[end:]


@dataclass(frozen=True)
class Before:
    """Lines before the statement at this line."""

    site: Site
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{_place(self.site)} before it: {'; '.join(self.lines)}"

    def changed(self, text: str) -> str:
        statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
        around = [node for node in statements if node.lineno <= self.site[1] <= (node.end_lineno or 0)]
        line = max(around, key=lambda node: node.lineno).lineno - 1
        whole = text.splitlines()[line]
        return _with_lines(text, line, self.lines, whole[: len(whole) - len(whole.lstrip())])


@dataclass(frozen=True)
class Top:
    """Lines after the first import of torch, for which those of the future have to be first."""

    file: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)} at the top: {'; '.join(self.lines)}"

    def changed(self, text: str) -> str:
        body = ast.parse(text).body
        imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
        of_torch = [node for node in imports if "torch" in ast.unparse(node).split()[1]]
        last = (of_torch or imports or [None])[0]
        if last is None:
            raise ValueError(f"{self.file} imports nothing")
        new = self.lines if of_torch else ("import torch", *self.lines)
        return _with_lines(text, last.end_lineno, new)


@dataclass(frozen=True)
class Shell:
    """Variables in front of the command."""

    variables: Mapping[str, str]

    def __str__(self) -> str:
        return "shell: " + " ".join(f"{name}={value}" for name, value in self.variables.items()) + " python …"


Edit = Keywords | Call | Before | Top | Shell


def diff(edits: Sequence[Edit], folder: str) -> str:
    """A unified diff with paths from this folder; variables of the shell are a comment above it."""
    texts: dict[str, list[Keywords | Call | Before | Top]] = {}
    for edit in edits:
        if not isinstance(edit, Shell):
            texts.setdefault(edit.file if isinstance(edit, Top) else edit.site[0], []).append(edit)
    parts = [f"# {edit}\n" for edit in edits if isinstance(edit, Shell)]
    for file, of_file in texts.items():
        before = after = Path(file).read_text()
        for edit in sorted(of_file, key=last_first):
            try:
                after = edit.changed(after)
            except ValueError as error:
                parts.append(f"# by hand, as {error}: {edit}\n")
        name = os.path.relpath(file, folder)
        name = name if not name.startswith("..") else file
        old, new = (text.splitlines(keepends=True) for text in (before, after))
        parts += difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return "".join(parts)


def last_first(edit: Edit) -> tuple[int, bool]:
    """A key to sort edits by, so that each leaves the lines of the next where they are."""
    line = getattr(edit, "site", ("", 0))[1]
    return -line, isinstance(edit, Before)


def _with_lines(text: str, at: int, new: Iterable[str], indent: str = "") -> str:
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:at], *(f"{indent}{line}\n" for line in new), *lines[at:]])


def _call(text: str, site: Site, callee: str) -> ast.Call:
    """The call of a function of this name at a line."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).split(".")[-1] != callee:
            continue
        if not site[1] or node.lineno <= site[1] <= (node.end_lineno or 0):
            return node
    raise ValueError(f"{_place(site)} has no call of {callee}")


def _span(text: str, node: ast.expr) -> tuple[int, int]:
    return _offset(text, node.lineno, node.col_offset), _offset(text, node.end_lineno, node.end_col_offset)


def _offset(text: str, line: int | None, column: int | None) -> int:
    """The position in the text of a line and a column in UTF-8 bytes, as the parser counts."""
    lines = text.splitlines(keepends=True)
    number = (line or 1) - 1
    return sum(map(len, lines[:number])) + len(lines[number].encode()[: column or 0].decode())


def _place(site: Site) -> str:
    return os.path.basename(site[0]) + (f":{site[1]}" if site[1] else "")
