"""`dlspeed guard SCRIPT …`."""

import argparse
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import shared

if TYPE_CHECKING:
    from ..guard.blocks import Guard

ABOUT = "Fail where an iteration of a script has more to do than was written down beside it."


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=shared.count, default=3, metavar="N", help="iterations to count (default: 3)")
    add("--after", dest="warm_up", type=shared.count, default=3, metavar="N", help="not counted (default: 3)")
    add("--update", action="store_true", help="write down anew what it does, and print the difference")
    shared.add_markdown(parser)
    shared.add_script(parser)


def run(options: argparse.Namespace) -> int:
    from ..guard.blocks import Guard
    from ..guard.record import FILE

    script, *arguments = shared.script_of(options)
    folder = Path.cwd() if options.module else Path(script).resolve().parent
    guarding = Guard(folder / FILE, update=options.update)
    with shared.prints_on_stderr() if options.markdown == "-" else contextlib.nullcontext():
        code = _guard(guarding, script, arguments, options)
    if options.markdown and guarding.comparison and os.environ.get("RANK", "0") == "0":  # one file of all ranks
        shared.show_markdown(options.markdown, guarding.comparison.markdown())
    return code


def _guard(guarding: "Guard", script: str, arguments: list[str], options: argparse.Namespace) -> Any:
    """The exit code, which may be the script's own."""
    from ..guard.blocks import guard_script
    from ..guard.record import CannotGuard, MoreWork

    counted = {"module": bool(options.module), "steps": options.steps, "warm_up": options.warm_up}
    try:
        code = guard_script(guarding, script, arguments, **counted)
    except MoreWork as more:
        print(more)
        return shared.MORE
    except CannotGuard as error:
        return shared.fail(error, 1)
    except Exception as error:  # the script's own
        return shared.script_failed(error, options)
    return shared.fail(f"{script} ended with code {code}", 1) if code in (shared.MORE, shared.UNDECIDED) else code
