"""Notebooks are run the way a reader runs them, top to bottom, each in a fresh kernel in its own folder; of their
outputs, new or as committed, one PDF, the pictures and README's headline are made.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from tqdm import tqdm

from ..lab.files import check_writable, project_root, replacing
from . import store
from .pages import BuildError, Chapter, ReportExporter, chapter, compiled, note, places

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
    root = project_root()
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
        pdf = compiled(exporter, chapters, pages)

    drawn = {figures / name: svg for name, svg in _figures(chapters).items()}
    made = {output: pdf} | (drawn if own else {})
    readme = root / "README.md"
    # The Markdown outputs that notebooks marked `{"helpers": {"readme": true}}`, in their order.
    marked = [output for output, about in _notes(list(notebooks.values())) if about.get("readme")]
    if own and readme.is_file() and (text := "\n\n".join(each.data["text/markdown"].strip() for each in marked)):
        made[readme] = with_headline(readme.read_text(encoding="utf-8"), text).encode()
    for sentence in outdated(list(notebooks.values())):
        print(f"no longer so, by its records: {sentence}", file=sys.stderr)
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


def outdated(notebooks: list[nbformat.NotebookNode]) -> list[str]:
    """The sentences that interpret records which no longer are what their author read."""
    return [about["outdated"] for _, about in _notes(notebooks) if "outdated" in about]


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


class _Client(NotebookClient):
    """Ctrl-C or SIGTERM ends the kernel and is a KeyboardInterrupt; nbclient's handlers end in an AssertionError."""

    stopped = 0  # by which signal

    async def async_start_new_kernel(self, **options: Any) -> None:
        execution = asyncio.current_task()

        def stop(number: int) -> None:
            self.stopped, self.shutdown_kernel = number, "immediate"
            execution.cancel()

        with contextlib.suppress(RuntimeError):  # in a thread, which gets no signals
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stop, number)
        await super().async_start_new_kernel(**options)

    def run(self, environment: dict[str, str]) -> None:
        try:
            self.execute(cleanup_kc=True, env=environment)
        except (asyncio.CancelledError, Exception):  # nbclient takes a cancelled cell for a dead kernel
            if self.stopped:
                raise KeyboardInterrupt(self.stopped) from None
            raise


def read(path: Path) -> nbformat.NotebookNode:
    """A notebook from its file."""
    try:
        return nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise BuildError(f"{path}: there is no such notebook") from None
    except Exception as error:  # nbformat raises whatever the JSON in the file leads to
        raise BuildError(f"{path.name}: this is not a notebook: {error}") from None


def execute(
    notebook: nbformat.NotebookNode, path: Path, environment: dict[str, str], on_cell: Callable[[], object]
) -> None:
    """Run all cells of a notebook in place, calling `on_cell` after each that has code. Ctrl-C ends the kernel, too.

    The kernel is this interpreter: with no folder of kernels to search, Jupyter takes the one that it
    would make itself, so a `python3` kernel of another Python that a user once installed is not used.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code":  # what an earlier run left would stand beside this one's outputs
            cell.outputs, cell.execution_count = [], None
    names = [where for _, where in places(notebook)]
    running = [names[0]] if names else []  # its last is the cell that was sent to the kernel last
    kernels = KernelSpecManager(kernel_dirs=[])
    client = _Client(
        notebook,
        km=AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels),
        resources={"metadata": {"path": str(path.parent.resolve())}},
        timeout=None,  # a cell may measure, with the budget that it was given
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],  # else it warns that it talks over TCP
        on_cell_execute=lambda cell, cell_index: running.append(names[cell_index]),
        on_cell_executed=lambda **_: on_cell(),
    )
    try:
        client.run(_kernel_environment(environment))
    except CellExecutionError as error:
        raise BuildError(f"{path.name}: {running[-1]}: {_in_a_line(error)}") from None
    except DeadKernelError:
        raise BuildError(f"{path.name}: {running[-1]}: the kernel died (was it out of memory?)") from None
    except RuntimeError as error:
        raise BuildError(f"{path.name}: the kernel did not start: {error}") from None


def code_cells(notebook: nbformat.NotebookNode) -> int:
    """How many cells will be run."""
    return sum(cell.cell_type == "code" and bool(cell.source.strip()) for cell in notebook.cells)


def check_executed(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Raise where the outputs of a notebook as it lies on disk are missing, or are an error's."""
    code = [(cell, where) for cell, where in places(notebook) if where.startswith("In [")]
    if code and not all(cell.execution_count for cell, _ in code):
        raise BuildError(f"{path.name}: it has not been executed: run it, or build with execution")
    for cell, where in code:
        expected = "raises-exception" in cell.metadata.get("tags", [])
        for output in cell.outputs:
            if output.output_type == "error" and not expected:
                raise BuildError(f"{path.name}: {where}: {_in_a_line(output)}")


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy to keep, without the timings, widget state and stderr that differ from run to run."""
    notebook = nbformat.from_dict(notebook)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({"tags": cell.metadata.tags} if cell.metadata.get("tags") else {})
        if cell.cell_type != "code":
            continue
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            for kind in [kind for kind in output.get("data", {}) if "jupyter.widget" in kind]:
                del output.data[kind]
    return notebook


def _kernel_environment(added: dict[str, str]) -> dict[str, str]:
    search = [str(project_root()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(search),  # the same library as here
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # else each kernel start prints a warning about its debugger
        **added,
    }


def _in_a_line(error: CellExecutionError | nbformat.NotebookNode) -> str:
    return " ".join(f"{error.ename}: {error.evalue}".split())
