"""Edits of the user's source: keywords, calls, lines before a statement or at the top, variables of the shell.

They are made on the text, at positions that Python's parser gives, so that comments and layout stay.
"""

import ast
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Site = tuple[str, int]  # a file and a line, or 0 for wherever in it


@dataclass(frozen=True)
class Keywords:
    """Give a call at this line these keywords; `callee` is the end of its function's name."""

    site: Site
    callee: str
    values: Mapping[str, str]

    def changed(self, text: str) -> str:
        call = _call(text, self.site, self.callee)
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        places = [(*span(text, given[name]), value) for name, value in self.values.items() if name in given]
        if new := ", ".join(f"{name}={value}" for name, value in self.values.items() if name not in given):
            last = span(text, call)[1] - 1
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

    def changed(self, text: str) -> str:
        call = _call(text, self.site, self.callee)
        start, end = span(text, call)
        return text[:start] + self.code.format(text[slice(*span(text, call.func))]) + text[end:]


@dataclass(frozen=True)
class Lines:
    """Lines before the statement at this line, or for line 0 after the first import of torch."""

    site: Site
    lines: tuple[str, ...]

    def changed(self, text: str) -> str:
        nodes, texts, new, indent = list(ast.walk(ast.parse(text))), text.splitlines(keepends=True), self.lines, ""
        if self.site[1]:
            statements = [node for node in nodes if isinstance(node, ast.stmt)]
            around = [node for node in statements if node.lineno <= self.site[1] <= (node.end_lineno or 0)]
            at = max(around, key=lambda node: node.lineno).lineno - 1
            indent = texts[at][: len(texts[at]) - len(texts[at].lstrip())]
        else:  # those of the future have to be first
            imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) and not node.col_offset]
            of_torch = [node for node in imports if "torch" in ast.unparse(node).split()[1]]
            at = (of_torch or imports)[0].end_lineno if imports else 0
            new = new if of_torch else ("import torch", *new)
        return "".join([*texts[:at], *(f"{indent}{line}\n" for line in new), *texts[at:]])


@dataclass(frozen=True)
class Rewritten:
    """A whole file as a function makes it of what it is; the site's line is 0, so that other edits come before."""

    site: Site
    changed: Callable[[str], str]


@dataclass(frozen=True)
class Shell:
    """Variables in front of the command."""

    variables: Mapping[str, str]


InText = Keywords | Call | Lines | Rewritten
Edit = InText | Shell


def diff(edits: Sequence[Edit], folder: str) -> str:
    """A unified diff with paths from this folder; variables of the shell are a comment above it."""
    texts: dict[str, list[InText]] = {}
    variables: dict[str, str] = {}
    for edit in edits:
        if isinstance(edit, Shell):
            variables |= edit.variables
        else:
            texts.setdefault(edit.site[0], []).append(edit)
    shell = " ".join(f"{name}={value}" for name, value in variables.items())
    parts = [f"# shell: {shell} python …\n"] if shell else []
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


def last_first(edit: InText) -> tuple[int, bool]:
    """A key to sort edits by, so that each leaves the lines of the next where they are."""
    return -edit.site[1], isinstance(edit, Lines)


def _call(text: str, site: Site, callee: str) -> ast.Call:
    """The call of a function of this name at a line."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).split(".")[-1] != callee:
            continue
        if not site[1] or node.lineno <= site[1] <= (node.end_lineno or 0):
            return node
    raise ValueError(f"{os.path.basename(site[0])}:{site[1]} has no call of {callee}")


def span(text: str, node: Any) -> tuple[int, int]:
    """Where a node of the source begins and ends."""
    return _offset(text, node.lineno, node.col_offset), _offset(text, node.end_lineno, node.end_col_offset)


def _offset(text: str, line: int | None, column: int | None) -> int:
    """The position in the text of a line and a column in UTF-8 bytes, as the parser counts."""
    lines = text.splitlines(keepends=True)
    number = (line or 1) - 1
    return sum(map(len, lines[:number])) + len(lines[number].encode()[: column or 0].decode())
