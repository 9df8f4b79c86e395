"""`dlspeed diagnose TRACE|FOLDER`."""

import argparse
from pathlib import Path

from .shared import add_formats, diagnosed, fail

ABOUT = "What bounds a training loop, from its profile, and what to change first."


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", type=Path, metavar="TRACE|FOLDER", help="of torch.profiler; a folder: a file a rank")
    add_formats(parser)


def run(options: argparse.Namespace) -> int:
    if options.html and options.html.resolve() == options.profile.resolve():
        return fail(f"{options.html} is the profile, which would be overwritten: name another file", 2)
    try:
        diagnosis = diagnosed(options.profile, options.html)
    except ValueError as error:  # what is no profile, or holds nothing
        return fail(error, 1)
    print(diagnosis.json() if options.json else diagnosis)
    return 0
