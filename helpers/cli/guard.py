"""`dlspeed guard SCRIPT …`."""

import argparse
from pathlib import Path

from .shared import add_script, count, fail, script_failed, script_of

ABOUT = "Fail where an iteration of a script has more to do than was written down beside it."


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=count, default=3, metavar="N", help="iterations to count (default: 3)")
    add("--after", dest="warm_up", type=count, default=3, metavar="N", help="not counted (default: 3)")
    add("--update", action="store_true", help="write down anew what it does, and print the difference")
    add_script(parser)


def run(options: argparse.Namespace) -> int:
    from ..guard.blocks import Guard, guard_script
    from ..guard.record import FILE, CannotGuard, MoreWork

    script, *arguments = script_of(options)
    folder = Path.cwd() if options.module else Path(script).resolve().parent
    guarding = Guard(folder / FILE, update=options.update)
    counted = {"module": bool(options.module), "steps": options.steps, "warm_up": options.warm_up}
    try:
        return guard_script(guarding, script, arguments, **counted)
    except MoreWork as more:
        print(more)
        return 1
    except CannotGuard as error:
        return fail(error, 1)
    except Exception as error:  # the script's own
        return script_failed(error, options)
