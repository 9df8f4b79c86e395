"""`dlspeed diagnose TRACE|FOLDER`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .shared import add_json, fail

if TYPE_CHECKING:
    from ..findings.summary import Diagnosis

ABOUT = "What bounds a training loop, from its profile, and what to change first."


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", type=Path, metavar="TRACE|FOLDER", help="of torch.profiler; a folder: a file a rank")
    add_formats(parser)


def add_formats(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the step's timeline as well")


def run(options: argparse.Namespace) -> int:
    if options.html and options.html.resolve() == options.profile.resolve():
        return fail(f"{options.html} is the profile, which would be overwritten: name another file", 2)
    try:
        diagnosis = diagnosed(options.profile, options.html)
    except ValueError as error:  # what is no profile, or holds nothing
        return fail(error, 1)
    print(diagnosis.json() if options.json else diagnosis)
    return 0


def diagnosed(profile: Path, html: Path | None) -> "Diagnosis":
    """The diagnosis of a profile or a folder; its page is written, if it is asked for."""
    from ..findings.diagnose import read_and_diagnose

    diagnosis, trace = read_and_diagnose(profile)
    if html:
        from ..findings.page import page
        from ..lab import files

        files.write(html, page(diagnosis, trace))
    return diagnosis
