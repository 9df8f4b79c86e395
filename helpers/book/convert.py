"""Markdown and tables of HTML become Typst, in one run of pandoc for all fragments of one format.

Pandoc needs about 40 ms to start and next to nothing for a cell, so a notebook costs two starts and
not one for each of its cells. `--file-scope` makes pandoc parse each fragment on its own: an unclosed code
fence, a footnote or a link of one cell cannot reach into the next.
"""

import hashlib
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from nbconvert.utils.exceptions import ConversionException

TEMPLATES = Path(__file__).parent / "templates" / "report"

# The Markdown of Jupyter: CommonMark with GitHub's tables and TeX between dollars. Pandoc's own Markdown
# would want an empty line before a list; `smart` is left out because it turns `--` into a dash.
READERS = {
    "markdown": "commonmark+pipe_tables+strikeout+task_lists+footnotes+tex_math_dollars+autolink_bare_uris",
    "html": "html",
}
_DISPLAYED = re.compile(r"\$\$.*?\$\$", re.DOTALL)
_NOT_TEX = re.compile(r"Could not convert TeX math (.*?)(?:, rendering as TeX|$)", re.DOTALL)


class BuildError(ConversionException):
    """What stopped the report, in one message for the person who wrote the notebook.

    It is a `ConversionException` so that `jupyter nbconvert` knows it and exits with an error.
    """


def convert(fragments: Sequence[tuple[str, str]]) -> list[str]:
    """Typst of each `(format, text)`, in their order; a format is a key of `READERS`."""
    converted = [""] * len(fragments)
    for reader in READERS:
        chosen = [i for i, (form, text) in enumerate(fragments) if form == reader and text.strip()]
        texts = [fragments[i][1] for i in chosen]
        if reader == "markdown":  # on one line: a line of math that begins with `+` or `-` would start a list
            texts = [_DISPLAYED.sub(lambda math: math[0].replace("\n", " "), text) for text in texts]
        for i, typst in zip(chosen, _run(reader, texts), strict=True):
            converted[i] = typst
    return converted


def _run(reader: str, texts: list[str]) -> list[str]:
    if not texts:
        return []
    import pypandoc

    # A paragraph that no text holds marks where one fragment ends and the next begins.
    mark = "cut" + hashlib.sha256("\0".join(texts).encode()).hexdigest()
    with TemporaryDirectory() as folder:
        for i, text in enumerate(texts):
            Path(folder, f"{i}").write_text(text, encoding="utf-8")
        Path(folder, "mark").write_text(mark, encoding="utf-8")
        files = [name for i in range(len(texts)) for name in (f"{i}", "mark")]
        options = ["--file-scope", "--wrap=none", "--from", READERS[reader], "--to", "typst"]
        command = [pypandoc.get_pandoc_path(), *options, f"--lua-filter={TEMPLATES / 'typst.lua'}", *files]
        done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise BuildError(f"pandoc failed: {done.stderr.strip()}")
    if unknown := _NOT_TEX.search(done.stderr):
        raise BuildError(f"this TeX cannot be set: {unknown[1].strip()}")
    return [part.strip("\n") for part in re.split(rf"(?m)^{mark}\n?", done.stdout)[:-1]]
