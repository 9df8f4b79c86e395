"""The report: all notebooks executed, combined and written as one PDF, or nothing changed at all."""

import errno
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import nbformat
from tqdm import tqdm

from helpers.lab.files import write

from .content import Chapter, note
from .convert import BuildError
from .execute import check_executed, cleaned, code_cells, execute, read
from .exporter import ReportExporter, compile_pdf

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"  # the part of README.md that quotes records


def build(
    notebooks: Sequence[Path | str] | None = None,
    *,
    execute: bool = True,
    output: Path | str | None = None,
    figures: Path | str | None = None,
    results: Path | str | None = None,
    save_notebooks: bool = False,
    progress: bool = True,
) -> Path:
    """Build the report from `notebooks/*.ipynb` and return the path of the PDF.

    With `execute` the notebooks are run first, each in a fresh kernel, and that takes as long as they take.
    Without it their committed outputs are used, which takes seconds. `output` is `report.pdf` and `figures`
    is `figures/` of the project unless given; `results` is where the kernels find records.

    The PDF, the figures and (with `save_notebooks`) the notebooks are written after everything has
    succeeded, all or none. A full build, of all notebooks and with execution, also removes SVG figures that no
    notebook draws any more, and writing the project's own report.pdf also renews the measured part of README.md.
    What is wrong with a notebook, and a folder that cannot be written, is raised as `BuildError`.
    """
    root = _project_root()
    chosen = sorted((root / "notebooks").glob("*.ipynb")) if notebooks is None else notebooks
    paths = [Path(path) for path in chosen]
    if not paths:
        raise BuildError(f"there is no notebook in {root / 'notebooks'}")
    output = Path(output) if output is not None else root / "report.pdf"
    figures = Path(figures) if figures is not None else root / "figures"
    if output.is_dir() or (figures.exists() and not figures.is_dir()):
        raise BuildError(f"{output} must be a file, and {figures} a folder")
    contents = [read(path) for path in paths]
    _check_writable([output.parent, figures, *(path.parent for path in paths if save_notebooks)])

    with TemporaryDirectory() as temporary:
        drawn, pages = Path(temporary, "figures"), Path(temporary, "pages")
        drawn.mkdir()
        pages.mkdir()
        if execute:
            _execute_all(contents, paths, _environment(Path(temporary), drawn, results), progress)
        else:
            for content, path in zip(contents, paths, strict=True):
                check_executed(content, path)
        exporter = ReportExporter()
        chapters = _chapters(exporter, contents, paths, pages)
        pdf = _compiled(exporter, chapters, pages, _waiting(contents))

        whole = notebooks is None and output.resolve() == root / "report.pdf"
        readme = update_readme(root / "README.md", contents) if whole else None
        named = _named_figures(chapters)
        for name, svg in named.items():
            if not (drawn / name).exists():
                (drawn / name).write_bytes(svg)
        made: dict[Path, bytes | None] = {output: pdf}
        if readme is not None:
            made[root / "README.md"] = readme
        made |= {figures / path.relative_to(drawn): path.read_bytes() for path in drawn.rglob("*") if path.is_file()}
        if notebooks is None and execute:
            made |= {old: None for old in figures.rglob("*.svg") if old not in made}
        if save_notebooks and execute:
            for content, path in zip(contents, paths, strict=True):
                made[path] = (nbformat.writes(cleaned(content)) + "\n").encode()
        _replace_all(made)
    return output


def _check_writable(folders: Sequence[Path]) -> None:
    """Find a folder that cannot be written before the notebooks run for an hour."""
    for folder in dict.fromkeys(folders):
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
        try:
            with TemporaryFile(dir=there):
                pass
        except OSError as error:
            raise BuildError(f"{folder}: cannot be written ({error.strerror})") from None


def _replace_all(contents: dict[Path, bytes | None]) -> None:
    """Write files and delete those whose content is None: all of them or, if one fails, none.

    All are written beside their places first, where a full disk shows, then renamed. What they replace is renamed,
    too, and takes its name back if a later one fails. Only a kill in the milliseconds of renaming leaves some of both.
    """
    parts, old = (
        {path: path.with_name(f".{path.name}.{os.getpid()}.{end}") for path in contents} for end in ("part", "old")
    )
    renamed: list[tuple[Path, bool]] = []  # and whether there was one
    try:
        for path, content in contents.items():
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if content is not None:
                write(parts[path], content)
        for path, content in contents.items():
            renamed.append((path, path.exists()))
            if path.exists():
                os.replace(path, old[path])
            if content is not None:
                os.replace(parts[path], path)
    except BaseException:
        for path, existed in reversed(renamed):
            if old[path].exists():
                os.replace(old[path], path)
            elif not existed:
                path.unlink(missing_ok=True)
        raise
    finally:
        for path in contents:
            parts[path].unlink(missing_ok=True)
            old[path].unlink(missing_ok=True)


def _project_root() -> Path:
    from helpers.lab.machine import project_root

    return project_root()


def _environment(temporary: Path, drawn: Path, results: Path | str | None) -> dict[str, str]:
    """What a kernel is told. Its own IPython folder keeps a user's startup files and history out of it."""
    environment = {"HELPERS_FIGURES": str(drawn), "IPYTHONDIR": str(temporary / "ipython")}
    if results is not None:
        environment["HELPERS_RESULTS"] = str(Path(results).resolve())
    return environment


def _execute_all(
    contents: list[nbformat.NotebookNode], paths: list[Path], environment: dict[str, str], progress: bool
) -> None:
    total = sum(map(code_cells, contents))
    with tqdm(total=total, unit="cell", file=sys.stderr, disable=not progress) as bar:
        for content, path in zip(contents, paths, strict=True):
            bar.set_description(path.stem)
            execute(content, path, environment, bar.update)


def _chapters(
    exporter: ReportExporter, contents: list[nbformat.NotebookNode], paths: list[Path], pages: Path
) -> list[Chapter]:
    chapters = []
    for position, (content, path) in enumerate(zip(contents, paths, strict=True), 1):
        about = {"metadata": {"name": path.stem, "path": str(path.parent)}}
        chapters.append(exporter.chapter(content, pages, about, position)[0])
    return chapters


def _waiting(notebooks: list[nbformat.NotebookNode]) -> list[tuple[str, str]]:
    """The tables that no machine has measured, each with what it is about."""
    outputs = [note(output) for nb in notebooks for cell in nb.cells for output in cell.get("outputs", [])]
    tables = {said["waiting"]: said.get("about", "") for said in outputs if "waiting" in said}
    return [(name, " ".join(about.split()).partition(". ")[0].rstrip(".")) for name, about in tables.items()]


def _compiled(exporter: ReportExporter, chapters: list[Chapter], pages: Path, waiting: list[tuple[str, str]]) -> bytes:
    try:
        return compile_pdf(exporter.document(chapters, contents=True, waiting=waiting), pages)
    except BuildError as whole:
        # Typst names a line of the whole document; the notebook is found by compiling each alone.
        for chapter in chapters:
            try:
                compile_pdf(exporter.document([chapter]), pages)
            except BuildError as error:
                raise BuildError(f"{chapter.file}: {error}") from None
        raise whole


def _named_figures(chapters: list[Chapter]) -> dict[str, bytes]:
    owners: dict[str, Chapter] = {}
    figures: dict[str, bytes] = {}
    for chapter in chapters:
        for name, svg in chapter.figures.items():
            if owners.setdefault(name, chapter) is not chapter and figures[f"{name}.svg"] != svg:
                raise BuildError(f"{chapter.file}: a figure of {owners[name].file} is called {name} too")
            figures[f"{name}.svg"] = svg
    return figures


def _headline(notebooks: list[nbformat.NotebookNode]) -> str:
    """The Markdown outputs that notebooks marked `{"helpers": {"readme": true}}`, in their order."""
    outputs = [output for nb in notebooks for cell in nb.cells for output in cell.get("outputs", [])]
    marked = [output for output in outputs if output.get("data") and note(output).get("readme")]
    return "\n\n".join(output.data["text/markdown"].strip() for output in marked)


def with_headline(readme: str, text: str) -> str:
    """The README with this text between its two marks."""
    if BEGIN not in readme or END not in readme:
        raise BuildError(f"README.md: the marks {BEGIN} and {END} are missing")
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n\n{text}\n\n{END}", readme, flags=re.DOTALL)


def update_readme(path: Path, notebooks: list[nbformat.NotebookNode]) -> bytes | None:
    """What the README should hold; None where there is no README or no notebook has anything for it."""
    text = _headline(notebooks)
    if not text or not path.is_file():
        return None
    return with_headline(path.read_text(encoding="utf-8"), text).encode()
