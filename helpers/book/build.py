"""The report: all notebooks executed, combined and written as one PDF, or nothing changed at all."""

import contextlib
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from tqdm import tqdm

from ..lab import machine
from ..lab.files import check_writable, replacing
from . import store
from .content import Chapter, chapter, note
from .convert import BuildError
from .execute import check_executed, cleaned, code_cells, execute, read
from .exporter import ReportExporter, compile_pdf

MACHINES = re.compile(r"^GPU, CPU = .*$", re.MULTILINE)  # the line of a notebook's second cell that names them
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"  # the part of README.md that quotes records


def build(
    *,
    execute: bool = True,
    output: Path | str | None = None,
    results: Path | str | None = None,
    save_notebooks: bool = False,
) -> Path:
    """Build the report from `notebooks/*.ipynb` and return the path of the PDF.

    With `execute` the notebooks are run first, each in a fresh kernel, and that takes as long as they take.
    Without it their committed outputs are used, which takes seconds. `output` is the project's
    `report.pdf` unless given; `results` is where the kernels find records, and whose machines are shown.

    The PDF and (with `save_notebooks`) the notebooks are written after everything has succeeded. Writing the project's
    own report.pdf also renews the figures and the measured part of README.md; with execution, SVG figures that no
    notebook draws any more are removed. What is wrong with a notebook is raised as `BuildError`.
    """
    root = machine.project_root()
    paths = sorted((root / "notebooks").glob("*.ipynb"))
    if not paths:
        raise BuildError(f"there is no notebook in {root / 'notebooks'}")
    output, figures = Path(output or root / "report.pdf"), root / "figures"
    own = output.resolve() == root / "report.pdf"
    for folder in (output.parent, figures) if own else (output.parent,):
        check_writable(folder, "--output")  # before the notebooks run
    notebooks = {path: read(path) for path in paths}

    with TemporaryDirectory() as temporary:
        if execute:
            # A kernel's own folders keep a user's startup files and history out of it, and the figures in place.
            environment = {"HELPERS_FIGURES": f"{temporary}/figures", "IPYTHONDIR": f"{temporary}/ipython"}
            if results is not None:
                environment["HELPERS_RESULTS"] = str(Path(results).resolve())
                _name_machines(notebooks, results)
            _execute_all(notebooks, environment)
        else:
            for path, notebook in notebooks.items():
                check_executed(notebook, path)
        exporter, pages = ReportExporter(), Path(temporary, "pages")
        pages.mkdir()
        chapters = [chapter(nb, path.stem, pages) for path, nb in notebooks.items()]
        pdf = _compiled(exporter, chapters, pages)

    drawn = {figures / name: svg for name, svg in _figures(chapters).items()}
    made = {output: pdf} | (drawn if own else {})
    readme = root / "README.md"
    # The Markdown outputs that notebooks marked `{"helpers": {"readme": true}}`, in their order.
    marked = [output for output, about in _notes(list(notebooks.values())) if about.get("readme")]
    if own and readme.is_file() and (text := "\n\n".join(each.data["text/markdown"].strip() for each in marked)):
        made[readme] = with_headline(readme.read_text(encoding="utf-8"), text).encode()
    if save_notebooks and execute:
        made |= {path: (nbformat.writes(cleaned(nb)) + "\n").encode() for path, nb in notebooks.items()}
    _replace_all(made)
    for old in set(figures.glob("*.svg")) - set(drawn) if execute and own else ():
        old.unlink()
    return output


def _name_machines(notebooks: dict[Path, nbformat.NotebookNode], results: Path | str) -> None:
    """Let the notebooks show the GPU and the CPU that have records in a folder, in place of those that they name."""
    gpus, cpus = store.devices(results), store.devices(results, cpu=True)
    if len(gpus) > 1 or len(cpus) > 1:
        raise BuildError(f"{results} has several machines of a kind: {', '.join([*gpus, *cpus])}; keep one of each")
    line = f"GPU, CPU = {(gpus or [''])[0]!r}, {(cpus or [''])[0]!r}"
    for notebook in notebooks.values():
        for cell in notebook.cells:
            cell.source = MACHINES.sub(lambda _: line, cell.source)


def _replace_all(contents: dict[Path, bytes]) -> None:
    """Write files: all beside their places first, where a full disk shows, then all are renamed."""
    with contextlib.ExitStack() as stack:
        for path, content in contents.items():
            stream = stack.enter_context(replacing(path))
            stream.write(content)
            stream.flush()


def _execute_all(notebooks: dict[Path, nbformat.NotebookNode], environment: dict[str, str]) -> None:
    with tqdm(total=sum(map(code_cells, notebooks.values())), unit="cell", file=sys.stderr) as bar:
        for path, notebook in notebooks.items():
            bar.set_description(path.stem)
            execute(notebook, path, environment, bar.update)


def _notes(notebooks: list[nbformat.NotebookNode]) -> list[tuple[nbformat.NotebookNode, dict]]:
    outputs = [output for nb in notebooks for cell in nb.cells for output in cell.get("outputs", [])]
    return [(output, note(output)) for output in outputs]


def _compiled(exporter: ReportExporter, chapters: list[Chapter], pages: Path) -> bytes:
    try:
        return compile_pdf(exporter.document(chapters, contents=True), pages)
    except BuildError as whole:
        # Typst names a line of the whole document; the notebook is found by compiling each alone.
        for each in chapters:
            try:
                compile_pdf(exporter.document([each]), pages)
            except BuildError as error:
                raise BuildError(f"{each.file}: {error}") from None
        raise whole


def _figures(chapters: list[Chapter]) -> dict[str, bytes]:
    """The figures that the notebooks name, by the names of their files."""
    figures: dict[str, bytes] = {}
    for each in chapters:
        for piece in each.pieces:
            if "name" in piece and figures.setdefault(f"{piece['name']}.svg", piece["content"]) != piece["content"]:
                raise BuildError(f"{each.file}: another figure is called {piece['name']}.svg, too")
    return figures


def with_headline(readme: str, text: str) -> str:
    """The README with this text between its two marks."""
    if BEGIN not in readme or END not in readme:
        raise BuildError(f"README.md: the marks {BEGIN} and {END} are missing")
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n\n{text}\n\n{END}", readme, flags=re.DOTALL)
