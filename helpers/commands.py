"""`dlspeed COMMAND …`: a thin skin over functions. Alone it prints its commands.

What the user got wrong ends in one line on stderr and a non-zero exit: 2 for a wrong command, 1 for a fault.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .command_line import parser, terminable
from .own_loop import WrongScript, diagnose, fail, guard, profile, referee, try_

if TYPE_CHECKING:
    from .fit import Card
    from .lab import Experiment
    from .train import Setup


BEGAN = time.perf_counter()


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # some builds of torch print a line when a profiler starts or stops
    command = ""
    try:
        options = parser().parse_args(arguments)  # takes a second, as torch is imported for its choices
        if not (command := options.command):
            print(*options.commands, "dlspeed COMMAND --help tells more", sep="\n")
            return 0
        # While notebooks run, signals are the report's to handle.
        with contextlib.nullcontext() if command == "report" else terminable():
            return _run(options)
    except KeyboardInterrupt as stopped:
        ended = {
            "measure": "stopped; finished rows are kept, and the same command goes on there",
            "report": "stopped; nothing was written",
            "referee": "stopped; cases of a submission that were judged are kept, and the same command goes on there",
        }
        return fail(ended.get(command, "stopped"), 128 + (*stopped.args, signal.SIGINT)[0])


def _run(options: argparse.Namespace) -> int:
    from .chapters import UnknownName
    from .lab.machine import NO_ASSERTIONS, DeviceError
    from .lab.records import RecordError

    if not __debug__ and options.command in ("measure", "report"):
        return fail(NO_ASSERTIONS, 2)
    try:
        return COMMANDS[options.command](options)
    except (UnknownName, WrongScript) as error:
        return fail(error, 2)
    except (DeviceError, RecordError, OSError) as error:
        return fail(error, 1)


def measure(options: argparse.Namespace) -> int:
    from . import lab
    from .chapters import select
    from .lab.machine import device_name, slug
    from .lab.records import plan

    chosen = select(options.targets)
    if options.check:
        return _check(chosen)
    if options.dry_run:
        return _dry_run(chosen, options) if options.machine is None else _plan_elsewhere(chosen, options)
    if options.machine is not None:
        return fail("--machine goes with --dry-run: only a plan can be of another machine", 2)
    left = options.seconds and options.seconds - (time.perf_counter() - BEGAN)
    done = lab.measure(chosen, options.preset, seconds=left, results=options.results)
    print(f"{done.measured} configurations measured, {done.fresh} were there, {done.left} left", end="")
    print("; the same command goes on there" if done.left else "")
    print(f"rows in {lab.records.folder(options.results) / slug(device_name())}", *plan.missing(done.missing), sep="\n")
    return fail(f"{done.failed} configurations failed: the status column says why", 1) if done.failed else 0


def _check(chosen: "list[Experiment]") -> int:
    from .lab.records.rehearsal import rehearse

    faults = rehearse(chosen, functools.partial(print, flush=True))
    print(*faults, sep="\n", end="\n" if faults else "")
    return fail(f"{len(faults)} faults in {len(chosen)} tables", 1) if faults else 0


def _dry_run(chosen: "list[Experiment]", options: argparse.Namespace) -> int:
    from .fit import this_memory_gib
    from .lab import device

    device()  # raises where the GPU can't be used, as measuring would
    memory_gib = this_memory_gib() if hasattr(os, "sysconf") else float("inf")  # Windows doesn't tell
    _print_plan(chosen, options, memory_gib)
    return 0


def _plan_elsewhere(chosen: "list[Experiment]", options: argparse.Namespace) -> int:
    from .lab.records.elsewhere import as_if_on

    try:
        with as_if_on(options.machine, options.results) as card:
            print(f"as if on {card.gpu}, with all packages that tables want")
            _print_plan(chosen, options, card.memory_gib)
    except ValueError as error:
        return fail(error, 2)
    return 0


def _print_plan(chosen: "list[Experiment]", options: argparse.Namespace, memory_gib: float) -> None:
    from .lab.records import plan

    again = options.seconds is not None
    plans = [plan.plan(e, options.preset, results=options.results, again=again) for e in chosen]
    print("\n".join(plan.lines(plans, memory_gib, options.seconds)))


def report(options: argparse.Namespace) -> int:
    try:
        from .lab.report import BuildError, build
    except ImportError as error:
        return fail(f"the report needs {error.name}: pip install -r requirements.txt", 1)
    try:
        path = build(
            execute=options.execute,
            output=options.output,
            results=options.results,
            save_notebooks=options.save_notebooks,
        )
    except BuildError as error:
        return fail(error, 1)
    print(path)
    return 0


def train(options: argparse.Namespace) -> int:
    import json

    from . import train as training

    try:
        setup = training.Setup(**_chosen(training.Setup, options))
        row = training.train(setup) if options.stages is None else _train_by_stages(options.stages, setup)
    except ValueError as error:  # what the user chose, or the data that was given
        return fail(error, 2)
    print(json.dumps(row))
    return 0


def _chosen(kind: type, options: argparse.Namespace) -> dict[str, Any]:
    """The options that are fields of a dataclass."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(kind)}


def _train_by_stages(chosen: str, setup: "Setup") -> dict[str, Any]:
    """The language model's training with stages switched on, which say what other options would."""
    from .training.stages import STAGES, environment, run, run_apart

    free = {name: getattr(setup, name) for name in ("preset", "epochs", "seed", "path")}
    if setup != type(setup)(**free):
        raise ValueError(f"--stages switches the rest itself; with it go {', '.join(f'--{name}' for name in free)}")
    named = {"all": list(STAGES), "none": []}
    stages = named.get(chosen, [name.strip() for name in chosen.split(",")])
    return (run_apart if environment() else run)(stages, **free)


def fit(options: argparse.Namespace) -> int:
    import json

    import torch

    from . import fit as fits

    if options.page:
        from .fit.page import page

        if not os.access(options.page.absolute().parent, os.W_OK):  # said before the minutes that it takes
            return fail(f"{options.page} can't be written", 1)
        options.page.write_text(page(), encoding="utf-8")
        return 0
    plan, result, faults = fits.Plan(**_chosen(fits.Plan, options)), {}, []
    try:
        gpu = _card(options)
        plan.check()
    except ValueError as error:  # what the user chose
        return fail(error, 2)
    memory = gpu.memory_gib or None if gpu and options.memory is None else options.memory
    forks = 0 if torch.cuda.is_available() else min(os.cpu_count() or 1, 4)
    parts = [lambda: fits.fit(plan, memory, forks)]
    parts += [lambda: {"speed": fits.estimate(fits.plan_run(plan), gpu, options.price)}] if gpu else []
    for part in parts:
        try:
            result |= part()
        except ValueError as error:  # of a model of somebody else's only one part may be known
            faults.append(error)
    if not result:
        return fail(faults[0], 2)
    print(*(f"dlspeed: {fault}" for fault in faults), sep="\n", end="\n" if faults else "", file=sys.stderr)
    texts = [fits.text(result)] if "fits" in result else []
    texts += [fits.estimate_text(result["speed"])] if "speed" in result else []
    print(json.dumps(result) if options.json else "\n".join(texts))
    return 0


def _card(options: argparse.Namespace) -> "Card | None":
    """The GPU that `fit` is asked for, by name or by its rates; None if it isn't."""
    from .fit import Card
    from .lab.cards import card

    if options.gpu:
        return card(options.gpu)
    if options.peak_tflops is options.bandwidth is options.price is None:
        return None
    if options.peak_tflops is None or options.bandwidth is None:
        raise ValueError("which GPU? give --gpu, or both --peak-tflops and --bandwidth")
    rates = {"bf16_tflops": options.peak_tflops, "gb_per_s": options.bandwidth}
    return Card(gpu="your GPU", memory_gib=options.memory or 0.0, **rates)


def grade(options: argparse.Namespace) -> int:
    import json

    from . import grading
    from .grading.grade import table, write_csv

    given = options.submission
    many = len(given) > 1 or given[0].is_dir()
    folders = [
        sorted(path for path in one.iterdir() if path.suffix in (".ipynb", ".py")) for one in given if one.is_dir()
    ]
    paths = [one for one in given if not one.is_dir()] + [path for folder in folders for path in folder]
    limits = grading.Limits(options.seconds, options.memory)
    submissions = grading.grade(paths, options.chapter, limits, options.seed)
    if not any(each.graded for each in submissions):
        faults = [fault for each in submissions for fault in each.faults]
        return fail(f"no exercise is in {given[0]}{': ' if faults else ''}{'; '.join(faults)}", 2)
    if options.csv:
        write_csv(submissions, options.csv)
    if options.json:
        rows = [each.row() for each in submissions]
        print(json.dumps(rows if many else rows[0], indent=1))
    else:
        print(table(submissions) if many else submissions[0].text())
    print(f"dlspeed: not limited on this machine: {', '.join(grading.not_limited())}", file=sys.stderr)
    return 0 if many or submissions[0].points == submissions[0].most else 1


def carry(options: argparse.Namespace) -> int:
    from . import carry as carrying

    try:
        print(carrying.carry(options.folder, options.python, options.has, options.wheels))
    except ValueError as error:
        return fail(error, 2)
    return 0


def doctor(options: argparse.Namespace) -> int:
    from .doctor import FAULT, findings, wanted

    if options.wanted:
        print(*wanted(), sep="\n")
        return 0
    sound = True
    for name, finding in findings(options.results):
        print(f"{name:<28}{finding}")
        sound = sound and not finding.startswith(FAULT)
    return 0 if sound else 1


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "doctor": doctor,
    "measure": measure,
    "carry": carry,
    "train": train,
    "diagnose": diagnose,
    "profile": profile,
    "try": try_,
    "guard": guard,
    "referee": referee,
    "fit": fit,
    "grade": grade,
    "report": report,
}
