"""The part of README.md that quotes records: written by the report, so that it cannot go stale."""

import re
from pathlib import Path

import nbformat

from .errors import BuildError
from .pieces import note

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def headline(notebooks: list[nbformat.NotebookNode]) -> str:
    """The Markdown outputs that notebooks marked `{"helpers": {"readme": true}}`, in their order."""
    outputs = [output for nb in notebooks for cell in nb.cells for output in cell.get("outputs", [])]
    marked = [output for output in outputs if output.get("data") and note(output).get("readme")]
    return "\n\n".join(output.data["text/markdown"].strip() for output in marked)


def with_headline(readme: str, text: str) -> str:
    """The README with this text between its two marks."""
    if BEGIN not in readme or END not in readme:
        raise BuildError(f"README.md: the marks {BEGIN} and {END} are missing")
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n\n{text}\n\n{END}", readme, flags=re.DOTALL)


def update(path: Path, notebooks: list[nbformat.NotebookNode]) -> bytes | None:
    """What the README should hold; None where there is no README or no notebook has anything for it."""
    text = headline(notebooks)
    if not text or not path.is_file():
        return None
    return with_headline(path.read_text(encoding="utf-8"), text).encode()
