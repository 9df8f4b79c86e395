"""The commands for training loops: `dlspeed profile | try | guard SCRIPT …`, `diagnose TRACE` and `referee CASES`."""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .findings.summary import Diagnosis
    from .script.recording import Recording


def diagnose(options: argparse.Namespace) -> int:
    if options.html and options.html.resolve() == options.profile.resolve():
        return fail(f"{options.html} is the profile, which would be overwritten: name another file", 2)
    try:
        result = _diagnose(options.profile, options)
    except ValueError as error:  # what is no profile, or holds nothing
        return fail(error, 1)
    print(result.json() if options.json else result)
    return 0


def _diagnose(profile: Path, options: argparse.Namespace) -> "Diagnosis":
    """The diagnosis of a profile or a folder; its page is written, if it is asked for."""
    from .findings.diagnose import read_and_diagnose
    from .findings.page import page
    from .lab import files

    diagnosis, trace = read_and_diagnose(profile)
    if options.html:
        files.write(options.html, page(diagnosis, trace))
    return diagnosis


class WrongScript(Exception):
    """A script that isn't given or isn't there."""


def _script(options: argparse.Namespace) -> list[str]:
    """The script or module, and its arguments."""
    if not (command := options.module or options.script):
        raise WrongScript(f"{options.command} what? SCRIPT [ARGS …] or -m MODULE [ARGS …]")
    if taken := [name for name in command[1:] if name.partition("=")[0] in options.own]:
        print(
            f"dlspeed: {' '.join(taken)} goes to {command[0]}; what {options.command} takes stands before it",
            file=sys.stderr,
        )
    return command if options.module else _existing(command)


def _existing(command: list[str]) -> list[str]:
    if not Path(command[0]).is_file():
        raise WrongScript(f"there is no script {command[0]}")
    return command


def try_(options: argparse.Namespace) -> int:
    from .lab import files
    from .trying import answer, search

    script, *arguments = _script(options)
    limits = {"module": bool(options.module), "seconds": options.seconds}
    limits["tell"] = functools.partial(print, file=sys.stderr, flush=True)
    try:
        if options.against or options.python:
            if options.only or options.write or (options.against and options.module):
                return fail("--against and --python compare two runs, without --only and --write", 2)
            edited, *theirs = _existing(shlex.split(options.against)) if options.against else [script, *arguments]
            python = options.python or sys.executable
            result = search.try_edited(script, arguments, edited, theirs, python=python, **limits)
        else:
            only = [name.strip() for name in options.only.split(",")] if options.only else []
            result = search.try_script(script, arguments, only=only, **limits)
    except ValueError as error:  # a change that isn't there
        return fail(error, 2)
    except search.CannotTry as error:
        return fail(error, 1)
    print(result.json() if options.json else answer.text(result))
    if options.write:
        files.write(options.write, result.patch)
        print(f"written to {options.write}", file=sys.stderr)
    return 0


def profile(options: argparse.Namespace) -> int:
    from .findings.caveats import loop_text
    from .findings.loop import Loop
    from .script.recording import NothingRecorded, record_script
    from .script.windows import Plan

    script, *arguments = _script(options)
    try:
        with _prints_on_stderr() if options.json else contextlib.nullcontext():
            recording = record_script(
                script,
                arguments,
                Plan(options.steps, options.warm_up, options.go_on, options.until_epoch, options.watch, options.limit),
                module=bool(options.module),
                output=options.output,
                tell=lambda line: print(line, file=sys.stderr, flush=True) if sys.stderr.isatty() else None,
            )
    except NothingRecorded as error:
        seen = loop_text(Loop(error.observation)) if error.observation else []
        print(*seen, sep="\n", end="\n" if seen else "")
        return fail(error, 1)
    except Exception as error:  # the script's own
        if type(error).__name__ == "OutOfMemoryError":
            _tell_what_filled(error, options)
        return _script_failed(error, options)
    return (_print_diagnosis(options, recording) if recording.rank == 0 else 0) or recording.code or 0


@contextlib.contextmanager
def _prints_on_stderr() -> Iterator[None]:
    """What a script and its processes print goes to stderr, so that stdout holds one document."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _tell_what_filled(error: Exception, options: argparse.Namespace) -> None:
    import torch

    from .script.out_of_memory import filled

    if not torch.cuda.is_initialized():
        return
    full = filled(error)
    told = {"out_of_memory": dataclasses.asdict(full) | {"advice": list(full.advice)}}
    print(json.dumps(told, indent=1) if options.json else "\n".join(full.text()))


def guard(options: argparse.Namespace) -> int:
    from .guard.blocks import Guard, guard_script
    from .guard.record import FILE, CannotGuard, MoreWork

    script, *arguments = _script(options)
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
        return _script_failed(error, options)


def referee(options: argparse.Namespace) -> int:
    from .lab import files
    from .refereeing import cases, judging, score

    tell = functools.partial(print, file=sys.stderr, flush=True)
    if bool(options.submission) == options.check:
        return fail("referee what? CASES SUBMISSION, or --check CASES", 2)
    if options.submission and not options.submission.is_dir():
        return fail(f"{options.submission} is no folder", 2)
    try:
        of = cases.read_cases(options.cases)
        if options.check:
            faults = [fault for case in of for fault in judging.check(case, options.seconds, tell)]
            return fail("; ".join(faults), 1) if faults else 0
        results = score.Results(judging.judge_all(of, options.submission, options.seconds, tell))
    except cases.WrongCase as error:
        return fail(error, 1)
    print(results.json() if options.json else results.text())
    if options.page:
        files.write(options.page, results.page(options.submission.name))
    return 0


def _script_failed(error: Exception, options: argparse.Namespace) -> int:
    from .script.running import script_frames

    frames = script_frames(error.__traceback__)
    if options.module and frames is None and isinstance(error, ImportError):
        return fail(error, 2)
    sys.excepthook(type(error), error.with_traceback(frames), frames)
    return 1


def _print_diagnosis(options: argparse.Namespace, recording: "Recording") -> int:
    try:
        diagnosis = _diagnose(recording.folder, options)
    except ValueError as error:
        return fail(f"{error}; the profiles are in {recording.folder}", 1)
    print(diagnosis.json() if options.json else diagnosis)
    print(*filter(None, [recording.note, f"saved in {recording.folder}"]), sep="\n", file=sys.stderr)
    return 0


def fail(reason: object, code: int) -> int:
    print("dlspeed:", *str(reason).split(), file=sys.stderr)  # in one line
    return code
