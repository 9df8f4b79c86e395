"""`dlspeed profile SCRIPT …`."""

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import shared

if TYPE_CHECKING:
    from ..script.observation import Observation
    from ..script.recording import Recording

ABOUT = "Run a training script as it is, profile a few iterations, and diagnose them."


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=shared.count, default=8, metavar="N", help="iterations to record (default: 8)")
    add("--after", type=shared.count, metavar="N", help="iterations before (default: 10, or as it needs)")
    add("--continue", dest="go_on", action="store_true", help="let the script go on to its end")
    add("--until-epoch", action="store_true", help="watch until an epoch has ended, or an evaluation")
    about = "watch so long, for steps that get slower and what grows with them"
    add("--watch", dest="minutes", type=shared.positive, default=0.0, metavar="MINUTES", help=about)
    add("--limit", type=shared.positive, default=120.0, metavar="S", help="from the first step on (default: 120)")
    add("--output", type=Path, metavar="DIR", help="where to save (default: profile-SCRIPT)")
    shared.add_formats(parser)
    shared.add_script(parser)


def run(options: argparse.Namespace) -> int:
    from ..script.recording import NothingRecorded, record_script
    from ..script.windows import Plan

    script, *arguments = shared.script_of(options)
    plan = Plan(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Plan)})
    how = {"module": bool(options.module), "output": options.output}
    how |= {"tell": shared.tell} if sys.stderr.isatty() else {}
    try:
        with shared.prints_on_stderr() if options.json else contextlib.nullcontext():
            recording = record_script(script, arguments, plan, **how)
    except NothingRecorded as error:
        if error.observation:
            _print_seen(error.observation)
        return shared.fail(error, 1)
    except Exception as error:  # the script's own
        if type(error).__name__ == "OutOfMemoryError":
            _print_what_fills(error, options)
        return shared.script_failed(error, options)
    return (_print_diagnosis(options, recording) if recording.rank == 0 else 0) or recording.code or 0


def _print_seen(observation: "Observation") -> None:
    from ..findings.caveats import loop_text
    from ..findings.loop import Loop

    for line in loop_text(Loop(observation)):
        print(line)


def _print_what_fills(error: Exception, options: argparse.Namespace) -> None:
    import torch

    from ..script.out_of_memory import filled

    if torch.cuda.is_initialized():
        full = filled(error)
        row = {"out_of_memory": dataclasses.asdict(full) | {"advice": list(full.advice)}}
        print(json.dumps(row, indent=1) if options.json else "\n".join(full.text()))


def _print_diagnosis(options: argparse.Namespace, recording: "Recording") -> int:
    try:
        diagnosis = shared.diagnosed(recording.folder, options.html)
    except ValueError as error:
        return shared.fail(f"{error}; the profiles are in {recording.folder}", 1)
    print(diagnosis.json() if options.json else diagnosis)
    print(*filter(None, [recording.note, f"saved in {recording.folder}"]), sep="\n", file=sys.stderr)
    return 0
