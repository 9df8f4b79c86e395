"""The commands of `dlspeed` and their options."""

import argparse
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}\n")


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM stops what runs as Ctrl-C does, which leaves no process and no temporary folder. A fork dies of it.

    The KeyboardInterrupt's argument is the signal's number.
    """
    owner = os.getpid()

    def stop(_number: int, _frame: object) -> None:
        if os.getpid() == owner:
            raise KeyboardInterrupt(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def parser() -> argparse.ArgumentParser:
    from .lab.records.experiment import PRESETS  # torch, which takes a second

    whole = Parser(prog="dlspeed", description="Measure, train, profile, diagnose, build the report.")
    commands, lines = whole.add_subparsers(title="commands", metavar="COMMAND"), []
    whole.set_defaults(command="", commands=lines)

    def command(name: str, about: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, description=about)
        added.set_defaults(command=name)
        lines.append(f"{name:<10}{about}")
        if name in ("doctor", "measure", "report"):
            added.add_argument("--results", type=Path, help="the folder of the records (default: data/results)")
        return added

    def formats(added: argparse.ArgumentParser) -> None:
        added.add_argument("--json", action="store_true", help="print JSON instead of text")
        added.add_argument("--html", type=Path, metavar="FILE", help="write a page with the step's timeline as well")

    def of_script(added: argparse.ArgumentParser) -> None:
        added.usage = "%(prog)s [options] (SCRIPT | -m MODULE) [ARGS …]"
        added.set_defaults(own={name for action in added._actions for name in action.option_strings})
        added.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module and its arguments")
        added.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT …", help="the script and its arguments")

    added = command("doctor", "What this machine is, what is installed, and what has been recorded on it.")
    added.add_argument("--wanted", action="store_true", help="only list what tables want and lack, as pip takes it")

    added = command("measure", "Measure what has no fresh record, and record each row when it is done.")
    added.add_argument("targets", nargs="*", metavar="CHAPTER[/TABLE]", help="what to measure (default: all)")
    added.add_argument("--preset", choices=PRESETS, help="sizes (default: those of this machine's class)")
    added.add_argument("--seconds", type=_positive, help="measure what fits, of most worth a second first")
    added.add_argument("--check", action="store_true", help="only try every table's smallest sizes, beside each other")
    added.add_argument("--dry-run", action="store_true", help="only print what would be measured, and how long")
    about = "plan for this GPU, which need not be there (with --dry-run), by its folder of records, such as nvidia-h200"
    added.add_argument("--machine", metavar="FOLDER", help=about)

    added = command("carry", "Pack the project, wheels and text into a folder, for a GPU's machine without a network.")
    added.add_argument("folder", type=Path, metavar="FOLDER", help="new or empty; `bash FOLDER/go` runs it there")
    added.add_argument("--python", default="3.12", metavar="X.Y", help="of that machine (default: 3.12)")
    added.add_argument("--has", type=Path, metavar="FILE", help="what it has, as `pip freeze` prints it (else torch)")
    added.add_argument("--wheels", type=Path, metavar="DIR", help="wheels of your own to add, such as apex")

    added = command("train", "Train a task in a chosen precision; the last line is the result as JSON.")
    added.add_argument("--task", default="lm", help="lm or segmentation (default: lm)")
    added.add_argument("--precision", default="dynamic", help="fp32, fp16, bf16, amp, static, dynamic or torch-scaler")
    added.add_argument("--data", default="standard", help="base, standard, balanced or sequenced")
    added.add_argument("--preset", default="small", choices=("small", "reduced", "long", "full"))
    added.add_argument("--epochs", type=int, default=5)
    added.add_argument("--seed", type=int, default=0)
    added.add_argument("--clip", type=float, help="the largest norm of the gradients")
    added.add_argument("--growth-interval", type=int, default=50, help="good steps before the dynamic scale grows")
    added.add_argument("--path", type=Path, help="WikiText or Carvana; generated data without")
    added.add_argument("--stages", help='a training of chapter 0: "all", "none", or names such as "batching,compile"')

    added = command("diagnose", "What bounds a training loop, from its profile, and what to change first.")
    added.add_argument("profile", type=Path, metavar="TRACE|FOLDER", help="of torch.profiler; a folder: a file a rank")
    formats(added)

    added = command("profile", "Run a training script as it is, profile a few iterations, and diagnose them.")
    added.add_argument("--steps", type=_count, default=8, metavar="N", help="iterations to record (default: 8)")
    added.add_argument(
        "--after", dest="warm_up", type=_count, metavar="N", help="iterations before (default: 10, or as it needs)"
    )
    added.add_argument("--continue", dest="go_on", action="store_true", help="let the script go on to its end")
    added.add_argument("--until-epoch", action="store_true", help="watch until an epoch has ended, or an evaluation")
    about = "watch so long, for steps that get slower and what grows with them"
    added.add_argument("--watch", type=_positive, default=0.0, metavar="MINUTES", help=about)
    added.add_argument("--limit", type=_positive, default=120.0, metavar="S", help="for the rest (default: 120)")
    added.add_argument("--output", type=Path, metavar="DIR", help="where to save (default: profile-SCRIPT)")
    formats(added)
    of_script(added)

    added = command("try", "Try changes on a training script as it is: what each did, and the edit to make.")
    added.add_argument("--seconds", type=_positive, default=300.0, metavar="S", help="for all trials (default: 300)")
    added.add_argument("--only", metavar="A,B", help="changes to try (default: all that apply)")
    added.add_argument(
        "--against", metavar="'FILE ARGS'", help="try a script that you edited, and no changes from outside"
    )
    added.add_argument(
        "--python", metavar="PYTHON", help="another environment's, which runs the script beside this one"
    )
    added.add_argument("--json", action="store_true", help="print JSON instead of text")
    added.add_argument("--write", type=Path, metavar="PATCH", help="write the changes that helped as a unified diff")
    of_script(added)

    added = command("guard", "Fail where an iteration of a script has more to do than was written down beside it.")
    added.add_argument("--steps", type=_count, default=3, metavar="N", help="iterations to count (default: 3)")
    added.add_argument("--after", dest="warm_up", type=_count, default=3, metavar="N", help="not counted (default: 3)")
    added.add_argument("--update", action="store_true", help="write down anew what it does, and print the difference")
    of_script(added)

    added = command("referee", "Judge edited training scripts: the same training still, and how much faster?")
    added.add_argument("cases", type=Path, metavar="CASES", help="a case's folder, or one of many such folders")
    added.add_argument(
        "submission", type=Path, nargs="?", metavar="SUBMISSION", help="a folder of CASE.py or CASE.patch files"
    )
    added.add_argument("--check", action="store_true", help="prove that each case's own fix is the same and faster")
    added.add_argument(
        "--seconds", type=_positive, default=60.0, metavar="S", help="for a paired trial at most (default: 60)"
    )
    added.add_argument("--json", action="store_true", help="print JSON instead of text")
    added.add_argument("--page", type=Path, metavar="FILE", help="write an HTML page as well")

    added = command("fit", "Where a training step's memory goes, whether it fits, and what would make it fit.")
    added.add_argument(
        "--model",
        default="llama-3.2-1b",
        help="a preset (default: llama-3.2-1b), a config.json, a class of transformers, or module:function, whose "
        "result for a batch size is a module and its example batch",
    )
    added.add_argument("--batch", type=_count, default=8, help="sequences of a step, over all ranks (default: 8)")
    added.add_argument("--sequence", type=_count, default=2048, metavar="TOKENS", help="default: 2048")
    added.add_argument("--strategy", default="single", help="single, ddp, zero2 or zero3 (default: single)")
    added.add_argument("--ranks", type=_count, default=1, help="default: 1")
    added.add_argument("--memory", type=_positive, metavar="GIB", help="of each device (default: this machine's)")
    added.add_argument("--precision", default="amp-bf16", help="fp32, amp-bf16, or on one device bf16")
    added.add_argument("--checkpointing", default="none", help="none, full, or on one device selective")
    added.add_argument("--head", default="full", help="full, or on one device chunked")
    added.add_argument("--gpu", metavar="NAME", help="predict the speed on this GPU, too: t4, h100, rtx4090 …")
    added.add_argument(
        "--peak-tflops", type=_positive, metavar="T", help="dense bf16 peak of a GPU without a name here"
    )
    added.add_argument("--bandwidth", type=_positive, metavar="GB/S", help="of such a GPU's memory")
    added.add_argument("--price", type=_positive, metavar="P", help="of a GPU and hour: the cost of 10⁹ tokens")
    added.add_argument("--page", type=Path, metavar="FILE", help="only write a page to play with, of many settings")
    added.add_argument("--json", action="store_true", help="print JSON instead of text")

    added = command(
        "grade", "Run students' notebooks and judge their exercises, each notebook in a process of its own."
    )
    added.add_argument("submission", type=Path, nargs="+", metavar="FILE|FOLDER", help="notebooks or scripts")
    added.add_argument(
        "--chapter", type=int, choices=range(1, 8), help="all of its exercises (default: of all that are in a file)"
    )
    added.add_argument(
        "--seconds",
        type=_positive,
        default=20.0,
        metavar="S",
        help="of CPU time for a cell or an exercise (default: 20); all cells of a file have 60",
    )
    added.add_argument("--memory", type=_positive, default=2.0, metavar="GIB", help="for each (default: 2)")
    added.add_argument("--seed", type=int, metavar="N", help="that checks draw their inputs from (default: random)")
    added.add_argument("--csv", type=Path, metavar="FILE", help="write a row for each student and exercise")
    added.add_argument("--json", action="store_true", help="print JSON instead of text")

    added = command("report", "Execute the notebooks, write figures/ and the PDF.")
    added.add_argument("--output", type=Path, help="default: the project's report.pdf; for another, figures/ stays")
    either = added.add_mutually_exclusive_group()
    either.add_argument("--no-execute", dest="execute", action="store_false", help="use the outputs that are there")
    either.add_argument("--save-notebooks", action="store_true", help="write the executed notebooks back")
    return whole


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
