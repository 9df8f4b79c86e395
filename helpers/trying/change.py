"""What a change is, the edits of a source that make it, and the kinds of changes that several share.

A change is applied in the script's process before the script begins: it replaces functions of torch, or waits for the
optimizer to be built and then changes the modules whose parameters it was given. `facts` are what an unchanged run
showed (`script.run_facts`); from them a change knows whether it applies, and where. Edits are made on the text, at
positions that Python's parser gives, so that comments and layout stay.
"""

import ast
import difflib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..script import hooks, run_facts

Site = tuple[str, int]  # a file and a line, or 0 for wherever in it


@dataclass(frozen=True)
class Keywords:
    """Give a call at this line these keywords, over those of a `**dict`; `callee` is the end of its function's name."""

    site: Site
    callee: str
    values: Mapping[str, str]

    def changed(self, text: str) -> str:
        call = _call(text, self.site, self.callee)
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        places = [(*span(text, given[name]), value) for name, value in self.values.items() if name in given]
        new = {name: value for name, value in self.values.items() if name not in given}
        if new and None in given:
            start, end = span(text, given[None])
            own = text[start:end] if isinstance(given[None], ast.Name) else f"({text[start:end]})"
            items = ", ".join(f'"{name}": {value}' for name, value in new.items())
            places.append((start, end, f"{{**{own}, {items}}}"))
        elif new:
            last = span(text, call)[1] - 1
            comma = "" if text[:last].rstrip().endswith(("(", ",")) else ", "
            places.append((last, last, comma + ", ".join(f"{name}={value}" for name, value in new.items())))
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


Facts = Mapping[str, Any]
OF_OPERATORS = ("operators", "compute")  # parts of a profile's account, on a CPU or a GPU
OF_OPTIMIZER = ("optimizer", "idle")
OF_ALL = (*OF_OPERATORS, *OF_OPTIMIZER, "loader", "copies", "Python")


class Change:
    """`group`: changes of which one excludes another. `patience`: how much longer than others it may take to start.

    `share`: of the `parts` of a step by its profile's account, what it could take away, for the order alone. It is
    small where almost any script could have the change, until a finding asks for it.
    """

    kind = "change"
    name = group = ""
    patience, share = 1.0, 0.1
    parts: tuple[str, ...] = OF_OPERATORS
    environment: Mapping[str, str] = {}

    def missing_because(self, facts: Facts) -> str:
        """Why it doesn't apply; nothing where it does."""
        return ""

    def apply(self, facts: Facts) -> None:
        """Change this process."""

    def edits(self, facts: Facts) -> list[Edit]:
        """The same as edits of the source."""
        return [Shell(self.environment)] if self.environment else []


class Loader(Change):
    """Options of the DataLoaders that the training reads."""

    parts, share = ("loader", "idle"), 0.5

    def options(self, loader: Mapping[str, Any]) -> dict[str, Any]:
        """The options that this one lacks."""
        raise NotImplementedError

    def missing_because(self, facts: Facts) -> str:
        return "" if self._sites(facts) else "no DataLoader of the training lacks it"

    def apply(self, facts: Facts) -> None:
        for key, options in self._sites(facts).items():
            with_options(hooks.LOADER_BUILT, options, {tuple(facts["loaders"][key]["site"])})

    def edits(self, facts: Facts) -> list[Edit]:
        edits: list[Edit] = []
        for key, options in self._sites(facts).items():
            values = {name: repr(value) for name, value in options.items()}
            if facts["loaders"][key]["builder"] == "transformers":
                values = {f"dataloader_{name}": value for name, value in values.items()}
                edits.append(Keywords((facts["script"], 0), "TrainingArguments", values))
            else:
                edits.append(Keywords(tuple(facts["loaders"][key]["site"]), "DataLoader", values))
        return edits

    def _sites(self, facts: Facts) -> dict[str, dict[str, Any]]:
        return {key: o for key, each in facts["loaders"].items() if each["trains"] and (o := self.options(each))}


class OnModels(Change):
    """Code that is run for each outermost module where the optimizer gets its parameters."""

    def code(self, model: Mapping[str, Any]) -> tuple[str, ...]:
        """Lines for the module of this description; none where it doesn't apply."""
        raise NotImplementedError

    def missing_because(self, facts: Facts) -> str:
        if not facts["models"]:
            return "no module has a name where the optimizer is built"
        return "" if any(map(self.code, facts["models"].values())) else "no module that it applies to"

    def apply(self, facts: Facts) -> None:
        changed: set[int] = set()

        def built(init: Callable[..., None], optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any) -> None:
            init(optimizer, *arguments, **options)
            frame = run_facts.user_frame(sys._getframe(1))
            site = run_facts.site_of(frame)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for name, module in run_facts.models_at(frame, parameters):
                if id(module) not in changed:
                    changed.add(id(module))
                    frame.f_globals.setdefault("torch", torch)
                    code = "\n".join(self.code(run_facts.describe(name, module, site)))
                    exec(code, frame.f_globals, dict(frame.f_locals))

        hooks.wrap({hooks.OPTIMIZER_BUILT: built})

    def edits(self, facts: Facts) -> list[Edit]:
        models = facts["models"].values()
        return [Lines(tuple(each["site"]), code) for each in models if (code := self.code(each))]


def with_options(constructor: hooks.Point, options: Mapping[str, Any], sites: set[tuple] | None = None) -> None:
    """Let a constructor that is called at one of these lines, or anywhere, have these options."""
    signature = inspect.signature(getattr(*constructor))

    def built(init: Callable[..., None], holder: Any, *arguments: Any, **given: Any) -> None:
        if sites is None or run_facts.site_of_caller() in sites:
            bound = signature.bind(holder, *arguments, **given)
            bound.arguments.update(options)
            arguments, given = bound.args[1:], bound.kwargs
        init(holder, *arguments, **given)

    hooks.wrap({constructor: built})
