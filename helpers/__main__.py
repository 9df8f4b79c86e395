"""`dlspeed doctor | measure | train | profile | diagnose | fit | report`: a thin skin over functions to call.

What the user got wrong ends in one line on stderr and a non-zero exit: 2 for a wrong command, 1 for a fault.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from helpers.lab import Experiment
    from helpers.profiling.diagnosis import Diagnosis
    from helpers.profiling.watch import Recording


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # some builds of torch print a line when a profiler starts or stops
    try:
        options, unknown = _parser().parse_known_args(arguments)
    except KeyboardInterrupt:  # the parser's choices take a second, as torch is imported for them
        return _fail("stopped", 130)
    if unknown:
        valid = ", ".join(option for action in options.parser._actions for option in action.option_strings)
        return _fail(f"unknown {unknown[0]!r}; valid options of {options.parser.prog}: {valid}", 2)
    try:
        return _run(options)
    except KeyboardInterrupt:
        ended = {
            measure: "stopped; finished rows are kept, and the same command goes on there",
            report: "stopped; nothing was written",
        }
        return _fail(ended.get(options.run, "stopped"), 130)


def _run(options: argparse.Namespace) -> int:
    from helpers.experiments import UnknownName
    from helpers.lab.machine import NO_ASSERTIONS, DeviceError
    from helpers.lab.records import RecordError

    if not __debug__ and options.run in (measure, report):
        return _fail(NO_ASSERTIONS, 2)
    try:
        return options.run(options)
    except UnknownName as error:
        return _fail(error, 2)
    except (DeviceError, RecordError, OSError) as error:
        return _fail(error, 1)


def measure(options: argparse.Namespace) -> int:
    from helpers import lab
    from helpers.experiments import select
    from helpers.lab.machine import device_name, slug

    chosen = select(options.targets)
    if options.dry_run:
        return _dry_run(chosen, options)
    done = lab.measure(chosen, options.preset, budget=options.budget, results=options.results, refresh=options.refresh)
    print(f"{done.measured} configurations measured, {done.fresh} were there, {done.left} left", end="")
    again = "the same command without --refresh" if options.refresh else "the same command"
    print(f"; {again} goes on there" if done.left else "")
    print(f"rows in {lab.records.folder(options.results) / slug(device_name())}")
    for damaged in done.damaged:
        _fail(damaged, 1)
    if done.damaged:
        return _fail(f"{len(done.damaged)} tables were left out, as they are damaged", 1)
    return _fail(f"{done.failed} configurations failed: the status column says why", 1) if done.failed else 0


def _dry_run(chosen: "list[Experiment]", options: argparse.Namespace) -> int:
    from helpers.fit import this_memory_gib
    from helpers.lab import device, plan

    device()  # raises where the GPU can't be used, as measuring would
    memory_gib = this_memory_gib() if hasattr(os, "sysconf") else float("inf")  # Windows doesn't tell
    plans = [plan.plan(e, options.preset, results=options.results, refresh=options.refresh) for e in chosen]
    print("\n".join(plan.lines(plans, memory_gib)))
    return max((_fail(p.damaged, 1) for p in plans if p.damaged), default=0)


def report(options: argparse.Namespace) -> int:
    try:
        from helpers.lab import report as reports
    except ImportError as error:
        return _fail(f"the report needs {error.name}: pip install -r requirements.txt", 1)
    if options.save_notebooks and not options.execute:
        return _fail("--save-notebooks saves what an execution gives: it cannot go with --no-execute", 2)
    try:
        path = reports.build(
            execute=options.execute,
            output=options.output,
            results=options.results,
            save_notebooks=options.save_notebooks,
        )
    except reports.BuildError as error:
        return _fail(error, 1)
    print(f"{path}")
    return 0


def train(options: argparse.Namespace) -> int:
    import json

    from helpers import train as training

    chosen = {field.name: getattr(options, field.name) for field in dataclasses.fields(training.Setup)}
    try:
        row = training.train(training.Setup(**chosen)) if options.stages is None else _train_by_stages(options)
    except ValueError as error:  # what the user chose, or the data that was given
        return _fail(_in_one_line(error), 2)
    print(json.dumps(row))
    return 0


def _train_by_stages(options: argparse.Namespace) -> dict:
    """The language model's training with stages switched on, which say what other options would."""
    from helpers.training.stages import STAGES, check_stages, environment, run, run_apart

    free = ("preset", "epochs", "seed", "path", "stages", "run", "parser")
    for name, value in vars(options).items():
        if name not in free and value != options.parser.get_default(name):
            raise ValueError(f"--stages switches {name} itself; with it go {', '.join(f'--{n}' for n in free[:4])}")
    named = {"all": list(STAGES), "none": []}
    stages = named.get(options.stages, [name.strip() for name in options.stages.split(",")])
    start = run_apart if environment(check_stages(stages)) else run
    return start(stages, preset=options.preset, epochs=options.epochs, seed=options.seed, path=options.path)


def diagnose(options: argparse.Namespace) -> int:
    from helpers.profiling import diagnose

    written = [path for path in (options.html, options.perfetto) if path]
    if options.after and written:
        return _fail("--html and --perfetto show one profile: leave AFTER out", 2)
    for path in written:
        if path.is_dir():
            return _fail(f"{path} is a folder: name a file to write", 2)
        if path.exists() and options.profile.exists() and path.samefile(options.profile):
            return _fail(f"{path} is the profile, which would be overwritten: name another file", 2)
    try:
        result = diagnose(options.profile, options.after) if options.after else _diagnose(options.profile, options)
    except ValueError as error:  # what is no profile, or holds nothing
        return _fail(_in_one_line(error), 1)
    print(result.json() if options.json else result)
    return 0


def _diagnose(profile: Path, options: argparse.Namespace) -> "Diagnosis":
    """The diagnosis of a profile or a folder; the page and the marked profile are written, if they are asked for."""
    from helpers.lab import files
    from helpers.profiling.diagnose import read_and_diagnose
    from helpers.profiling.page import page
    from helpers.profiling.perfetto import marked

    diagnosis, trace = read_and_diagnose(profile)
    if options.html:
        files.write(options.html, page(diagnosis, trace))
    if options.perfetto:
        marked(diagnosis.source, diagnosis, trace, options.perfetto)
    return diagnosis


def profile(options: argparse.Namespace) -> int:
    from helpers.profiling.run_script import script_frames
    from helpers.profiling.watch import NothingRecorded, watch

    is_module = options.module is not None
    script, *arguments = options.module or options.script or [""]
    if not script:
        return _fail("profile what? SCRIPT [ARGS …] or -m MODULE [ARGS …]", 2)
    if not is_module and not Path(script).is_file():
        return _fail(f"there is no script {script}", 2)
    try:
        recording = watch(
            script,
            arguments,
            module=is_module,
            steps=options.steps,
            after=options.warm_up,
            go_on=options.go_on,
            output=options.output,
        )
    except NothingRecorded as error:
        return _fail(error, 1)
    except Exception as error:  # the script's own
        frames = script_frames(error.__traceback__)
        if is_module and frames is None and isinstance(error, ImportError):
            return _fail(error, 2)
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return 1
    return (_print_diagnosis(options, recording) if recording.rank == 0 else 0) or recording.code or 0


def _print_diagnosis(options: argparse.Namespace, recording: "Recording") -> int:
    try:
        diagnosis = _diagnose(recording.folder, options)
    except ValueError as error:
        return _fail(f"{_in_one_line(error)}; the profiles are in {recording.folder}", 1)
    print(diagnosis.json() if options.json else diagnosis)
    print(*filter(None, [recording.note, f"saved in {recording.folder}"]), sep="\n", file=sys.stderr)
    return 0


def fit(options: argparse.Namespace) -> int:
    import json

    import helpers.fit as fits

    chosen = {field.name: getattr(options, field.name) for field in dataclasses.fields(fits.Plan)}
    try:
        result = fits.fit(fits.Plan(**chosen), options.memory)
    except ValueError as error:  # what the user chose
        return _fail(error, 2)
    print(json.dumps(result) if options.json else fits.text(result))
    return 0


def doctor(options: argparse.Namespace) -> int:
    from helpers.doctor import FAULT, findings

    sound = True
    for name, finding in findings(options.results):
        print(f"{name:<28}{finding}")
        sound = sound and not finding.startswith(FAULT)
    return 0 if sound else 1


def _parser() -> argparse.ArgumentParser:
    from helpers.lab.experiment import PRESETS

    parser = Parser(prog="dlspeed", description="Measure, train, profile, diagnose, build the report.")
    commands = parser.add_subparsers(
        required=True, metavar="doctor | measure | train | profile | diagnose | fit | report"
    )

    def command(name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, description=about)
        added.set_defaults(run=run, parser=added)
        if run not in (train, profile, diagnose, fit):
            added.add_argument("--results", type=Path, help="the folder of the records (default: data/results)")
        return added

    def formats(added: argparse.ArgumentParser) -> None:
        added.add_argument("--json", action="store_true", help="print JSON instead of text")
        added.add_argument("--html", type=Path, metavar="FILE", help="write a page with the step's timeline as well")
        added.add_argument("--perfetto", type=Path, metavar="FILE", help="write the profile with the findings marked")

    command("doctor", doctor, "What this machine is, what is installed, and what has been recorded on it.")

    added = command("measure", measure, "Measure what has no fresh record, and record each row when it is done.")
    added.add_argument("targets", nargs="*", metavar="CHAPTER[/TABLE]", help="what to measure (default: all)")
    added.add_argument("--preset", choices=PRESETS, help="sizes (default: those of this machine's class)")
    added.add_argument("--budget", type=_seconds, metavar="SECONDS", help="start nothing new after so long")
    added.add_argument("--refresh", action="store_true", help="measure again what has a fresh record")
    added.add_argument("--dry-run", action="store_true", help="only print what is missing, its minutes and memory")

    added = command("train", train, "Train a task in a chosen precision; the last line is the result as JSON.")
    added.add_argument("--task", default="lm", help="lm or segmentation (default: lm)")
    added.add_argument("--precision", default="dynamic", help="fp32, fp16, bf16, amp, static, dynamic or torch-scaler")
    added.add_argument("--autocast", default="ours", help="ours or torch")
    added.add_argument("--data", default="standard", help="base, standard, balanced or sequenced")
    added.add_argument("--preset", default="small", choices=("small", "reduced", "full"))
    added.add_argument("--epochs", type=int, default=5)
    added.add_argument("--seed", type=int, default=0)
    added.add_argument("--clip", type=float, help="the largest norm of the gradients")
    added.add_argument("--growth-interval", type=int, default=50, help="good steps before the dynamic scale grows")
    added.add_argument("--path", type=Path, help="WikiText or Carvana; generated data without")
    added.add_argument(
        "--stages", help='the whole training of chapter 0: "all", "none", or names such as "batching,compile"'
    )
    added.add_argument("--checkpoint", type=Path, help="where to keep the run; it goes on from there if it exists")

    added = command("diagnose", diagnose, "What bounds a training loop, from its profile, and what to change first.")
    added.add_argument("profile", type=Path, metavar="TRACE|FOLDER", help="of torch.profiler; a folder: a file a rank")
    added.add_argument("after", type=Path, nargs="?", metavar="AFTER", help="one recorded after a change: compare")
    formats(added)

    added = command("profile", profile, "Run a training script as it is, profile a few iterations, and diagnose them.")
    added.add_argument("--steps", type=_count, default=8, metavar="N", help="iterations to record (default: 8)")
    added.add_argument(
        "--after", dest="warm_up", type=_count, metavar="N", help="iterations before (default: 10, or as it needs)"
    )
    added.add_argument("--continue", dest="go_on", action="store_true", help="let the script go on to its end")
    added.add_argument("--output", type=Path, metavar="DIR", help="where to save (default: profile-SCRIPT)")
    formats(added)
    added.set_defaults(after=None)
    added.usage = "%(prog)s [options] (SCRIPT | -m MODULE) [ARGS …]"
    added.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module and its arguments: -m MODULE …")
    added.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT …", help="the script and its arguments")

    added = command("fit", fit, "Where a training step's memory goes, whether it fits, and what would make it fit.")
    added.add_argument("--model", default="llama-3.2-1b", help="default: llama-3.2-1b")
    added.add_argument("--batch", type=_count, default=8, help="sequences of a step, over all ranks (default: 8)")
    added.add_argument("--sequence", type=_count, default=2048, metavar="TOKENS", help="default: 2048")
    added.add_argument("--strategy", default="single", help="single, ddp, zero2 or zero3 (default: single)")
    added.add_argument("--ranks", type=_count, default=1, help="default: 1")
    added.add_argument("--memory", type=float, metavar="GIB", help="of each device (default: this machine's)")
    added.add_argument("--precision", default="amp-bf16", help="fp32, amp-bf16, or on one device bf16")
    added.add_argument("--checkpointing", default="none", help="none, full, or on one device selective")
    added.add_argument("--head", default="full", help="full, or on one device chunked")
    added.add_argument("--json", action="store_true", help="print JSON instead of text")

    added = command("report", report, "Execute the notebooks, write figures/ and the PDF.")
    added.add_argument("--no-execute", dest="execute", action="store_false", help="use the outputs that are there")
    added.add_argument("--output", type=Path, help="default: report.pdf of the project")
    added.add_argument("--save-notebooks", action="store_true", help="write the executed notebooks back")
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _fail(reason: object, code: int) -> int:
    print(f"dlspeed: {reason}", file=sys.stderr)
    return code


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
