"""`dlspeed carry FOLDER`."""

import argparse
from pathlib import Path

from .shared import fail

ABOUT = "Pack the project, wheels and text into a folder, for a GPU's machine without a network."


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="new or empty; `bash FOLDER/go` runs it there")
    add("--python", default="3.12", metavar="X.Y", help="of that machine (default: 3.12)")
    add("--has", type=Path, metavar="FILE", help="what it has, as `pip freeze` prints it (else torch)")
    add("--wheels", type=Path, metavar="DIR", help="wheels of your own to add, such as apex")


def run(options: argparse.Namespace) -> int:
    from .. import carry

    try:
        print(carry.carry(options.folder, options.python, options.has, options.wheels))
    except ValueError as error:
        return fail(error, 2)
    return 0
