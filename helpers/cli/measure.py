"""`dlspeed measure …`."""

import argparse
import functools
import os
import time
from typing import TYPE_CHECKING

from ..lab.arguments import PRESETS
from . import BEGAN
from .shared import Wrong, add_results, fail, positive

if TYPE_CHECKING:
    from ..book import Table

ABOUT = "Measure what has no fresh record, and record each row when it is done."


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_results(parser)
    add("targets", nargs="*", metavar="CHAPTER[/TABLE]", help="what to measure (default: all)")
    add("--preset", choices=PRESETS, help="sizes (default: those of this machine's class)")
    add("--seconds", type=positive, help="measure what fits, of most worth a second first")
    add("--check", action="store_true", help="only try every table's smallest sizes, beside each other")
    add("--dry-run", action="store_true", help="only print what would be measured, and how long")
    about = "plan for this GPU, which need not be there (with --dry-run), by its folder of records, such as nvidia-h200"
    add("--machine", metavar="FOLDER", help=about)


def run(options: argparse.Namespace) -> int:
    from .. import book
    from ..book import plan
    from ..chapters import select
    from ..lab.machine import NO_ASSERTIONS, device_name, slug

    if not __debug__:
        raise Wrong(NO_ASSERTIONS)
    chosen = select(options.targets)
    if options.check:
        return _check(chosen)
    if options.dry_run:
        return _dry_run(chosen, options) if options.machine is None else _plan_elsewhere(chosen, options)
    if options.machine is not None:
        raise Wrong("--machine goes with --dry-run: only a plan can be of another machine")
    left = options.seconds and options.seconds - (time.perf_counter() - BEGAN)
    done = book.measure(chosen, options.preset, seconds=left, results=options.results)
    print(f"{done.measured} configurations measured, {done.fresh} were there, {done.left} left", end="")
    print("; the same command goes on there" if done.left else "")
    print(f"rows in {book.folder(options.results) / slug(device_name())}", *plan.missing(done.missing), sep="\n")
    return fail(f"{done.failed} configurations failed: the status column says why", 1) if done.failed else 0


def _check(chosen: "list[Table]") -> int:
    from ..book.rehearsal import rehearse

    faults = rehearse(chosen, functools.partial(print, flush=True))
    print(*faults, sep="\n", end="\n" if faults else "")
    return fail(f"{len(faults)} faults in {len(chosen)} tables", 1) if faults else 0


def _dry_run(chosen: "list[Table]", options: argparse.Namespace) -> int:
    from ..fit import this_memory_gib
    from ..lab import device

    device()  # raises where the GPU can't be used, as measuring would
    memory_gib = this_memory_gib() if hasattr(os, "sysconf") else float("inf")  # Windows doesn't tell
    _print_plan(chosen, options, memory_gib)
    return 0


def _plan_elsewhere(chosen: "list[Table]", options: argparse.Namespace) -> int:
    from ..book.elsewhere import as_if_on

    try:
        with as_if_on(options.machine, options.results) as card:
            print(f"as if on {card.gpu}, with all packages that tables want")
            _print_plan(chosen, options, card.memory_gib)
    except ValueError as error:
        return fail(error, 2)
    return 0


def _print_plan(chosen: "list[Table]", options: argparse.Namespace, memory_gib: float) -> None:
    from ..book import plan

    again = options.seconds is not None
    plans = [plan.plan(e, options.preset, results=options.results, again=again) for e in chosen]
    print("\n".join(plan.lines(plans, memory_gib, options.seconds)))
