"""Changes that are replacements in the source, such as an evaluation without gradients.

They are looked for in the script and in the files beside it that it imports, and tried as edited files.
"""

import ast
import difflib
import re
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from ..script import hooks, running
from .change import Change, Facts
from .edits import Edit, Rewritten

TORCH = re.compile(r"^import torch$", re.MULTILINE)
IMPORTED = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)
TRAINS = re.compile(r"\.(backward|step|zero_grad)\(|no_grad|inference_mode|set_grad_enabled")
EVALUATES = re.compile(r"_?(eval|valid|test)")


class Replacement(Change):
    """A change that is its edit."""

    def replaced(self, text: str) -> str:
        """A source, which imports torch by this name, under the change."""
        raise NotImplementedError

    def edits(self, facts: Facts) -> list[Edit]:
        script = Path(facts["script"])
        files = [script, *(script.with_name(f"{name}.py") for name in IMPORTED.findall(script.read_text()))]
        texts = {str(file): file.read_text() for file in files if file.is_file()}
        of_torch = {file: text for file, text in texts.items() if TORCH.search(text)}
        return [Rewritten((file, 0), self.replaced) for file, text in of_torch.items() if self.replaced(text) != text]

    def missing_because(self, facts: Facts) -> str:
        return "" if self.edits(facts) else "the source has nothing of the kind"

    def apply(self, facts: Facts) -> None:
        edited = {edit.site[0] for edit in self.edits(facts)}

        def code(read: Callable[..., Any], *place: Any) -> CodeType:
            path = str(place[0]) if len(place) == 1 else place[0].get_filename(place[1])
            return compiled(path, self.replaced) if path in edited else read(*place)

        hooks.wrap({hooks.SOURCE: code, hooks.Point(running, "compiled"): code})


def compiled(path: str, replaced: Callable[[str], str]) -> CodeType:
    """A file under a replacement, whose lines keep their numbers, by which other changes know their places."""
    before = Path(path).read_text()
    after, numbers = replaced(before), {}
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    for kind, old, _, new, end in matcher.get_opcodes():
        numbers |= {line + 1: old + 1 + (line - new) * (kind == "equal") for line in range(new, end)}
    tree = ast.parse(after)
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            node.lineno, node.end_lineno = numbers[node.lineno], numbers[node.end_lineno]
            node.col_offset = node.end_col_offset = 0
    return compile(tree, path, "exec", dont_inherit=True)


class NoGradients(Replacement):
    """Functions that evaluate keep no graph."""

    name, share = "no-grad", 0.05

    def replaced(self, text: str) -> str:
        lines = text.splitlines(keepends=True)
        for each in reversed(functions(text)):
            code = ast.unparse(each)
            if (EVALUATES.match(each.name) or ".eval()" in code) and not TRAINS.search(code):
                lines.insert(each.lineno - 1, f"{' ' * each.col_offset}@torch.no_grad()\n")
        return "".join(lines)


def functions(text: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
