"""`dlspeed report`."""

import argparse
from pathlib import Path

from .shared import Wrong, add_results, fail

ABOUT = "Execute the notebooks, write figures/ and the PDF."


def add_options(parser: argparse.ArgumentParser) -> None:
    add_results(parser)
    about = "default: the project's report.pdf; for another, figures/ stays"
    parser.add_argument("--output", type=Path, help=about)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--no-execute", dest="execute", action="store_false", help="use the outputs that are there")
    either.add_argument("--save-notebooks", action="store_true", help="write the executed notebooks back")


def run(options: argparse.Namespace) -> int:
    if not __debug__:
        from ..lab.machine import NO_ASSERTIONS

        raise Wrong(NO_ASSERTIONS)
    try:
        from ..book import BuildError, build
    except ImportError as error:
        return fail(f"the report needs {error.name}: pip install -r requirements.txt", 1)
    chosen = {name: getattr(options, name) for name in ("execute", "output", "results", "save_notebooks")}
    try:
        print(build(**chosen))
    except BuildError as error:
        return fail(error, 1)
    return 0
