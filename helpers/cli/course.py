"""`dlspeed course DIR`."""

import argparse
from pathlib import Path

from .shared import fail, tell

ABOUT = "Make a course's handout: notebooks with stubs, and this package without what exercises ask for."


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="a new folder")
    add("--zip", action="store_true", help="pack it, too, as DIR.zip")
    add("--address", default="", metavar="URL", help="of that zip, from which a notebook alone fetches the rest")


def run(options: argparse.Namespace) -> int:
    from ..course import hand_out

    try:
        tell(hand_out(options.folder, options.address, options.zip))
    except (ValueError, OSError) as error:
        return fail(error, 2)
    return 0
