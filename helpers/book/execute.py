"""Notebooks are run the way a reader runs them: top to bottom, in a fresh kernel, in their own folder."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from ..lab.machine import project_root
from .content import places
from .convert import BuildError


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
