"""`dlspeed try SCRIPT …`."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import shared

if TYPE_CHECKING:
    from ..trying.answer import Tried

ABOUT = "Try changes on a training script as it is: what each did, and the edit to make."


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seconds", type=shared.positive, default=300.0, metavar="S", help="for all trials (default: 300)")
    add("--only", metavar="A,B", help="changes to try (default: all that apply)")
    add("--against", metavar="'FILE ARGS'", help="try a script that you edited, and no changes from outside")
    add("--python", metavar="PYTHON", help="another environment's, which runs the script beside this one")
    shared.add_json(parser)
    shared.add_markdown(parser, " (of --against and --python)")
    add("--write", type=Path, metavar="PATCH", help="write the changes that helped as a unified diff")
    shared.add_script(parser)


def run(options: argparse.Namespace) -> int:
    from ..lab import files
    from ..trying import answer, search

    script, *arguments = shared.script_of(options)
    if options.markdown and not (options.against or options.python):
        return shared.fail("--markdown needs --against or --python", 2)
    if options.markdown == "-" and options.json:
        return shared.fail("--markdown - and --json print one document each: choose one", 2)
    limits = {"module": bool(options.module), "seconds": options.seconds, "tell": shared.tell}
    try:
        if options.against or options.python:
            if options.only or options.write or (options.against and options.module):
                return shared.fail("--against and --python compare two runs, without --only and --write", 2)
            edited, *others = shared.existing(shlex.split(options.against)) if options.against else [script, *arguments]
            python = options.python or sys.executable
            result = search.try_edited(script, arguments, edited, others, python=python, **limits)
        else:
            only = [name.strip() for name in options.only.split(",")] if options.only else []
            result = search.try_script(script, arguments, only=only, **limits)
    except ValueError as error:  # a change that isn't there
        return shared.fail(error, 2)
    except search.CannotTry as error:
        return shared.fail(error, 1)
    if options.markdown:
        shared.show_markdown(options.markdown, answer.markdown_of(result))
    if options.markdown != "-":
        print(result.json() if options.json else answer.text(result))
    if options.write:
        files.write(options.write, result.patch)
        shared.tell(f"written to {options.write}")
    return _code(result.tried[0]) if options.against or options.python else 0


def _code(beside: "Tried") -> int:
    """What a shell is told of a script beside the other; where that one fails, it is a fault."""
    from ..lab import estimate

    if beside.verdict == "failed":
        return shared.fail(beside.reason, 1)
    if beside.verdict == estimate.SLOWER:
        return shared.MORE
    return shared.UNDECIDED if estimate.verdict_class(beside.verdict) == estimate.UNDECIDED else 0
