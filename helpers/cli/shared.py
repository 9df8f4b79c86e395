"""What commands share: a parser whose errors are a line, kinds of arguments, a script and its arguments, ends."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..findings.summary import Diagnosis

MORE, UNDECIDED = 3, 4  # exit codes: a step takes longer or has more to do; a trial can't tell


class Wrong(Exception):
    """What the user got wrong, in one line."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}\n")


def fail(reason: object, code: int) -> int:
    print("dlspeed:", *str(reason).split(), file=sys.stderr)  # in one line
    return code


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_formats(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the step's timeline as well")


def add_markdown(parser: argparse.ArgumentParser, where: str = "") -> None:
    about = f"write a summary for a pull request as well{where}; - prints it in place of the text"
    parser.add_argument("--markdown", metavar="FILE", help=about)


def show_markdown(file: str, text: str) -> None:
    from ..lab import files

    if file == "-":
        print(text)
    else:
        files.write(file, text + "\n")


@contextlib.contextmanager
def prints_on_stderr() -> Iterator[None]:
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


def add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, help="the folder of the records (default: data/results)")


def add_script(parser: argparse.ArgumentParser) -> None:
    """A script or module with its arguments, after all options of the command itself."""
    parser.usage = "%(prog)s [options] (SCRIPT | -m MODULE) [ARGS …]"
    parser.set_defaults(own={name for action in parser._actions for name in action.option_strings})
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module and its arguments")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT …", help="the script and its arguments")


def script_of(options: argparse.Namespace) -> list[str]:
    """The script or module, and its arguments."""
    if not (command := options.module or options.script):
        raise Wrong(f"{options.command} what? SCRIPT [ARGS …] or -m MODULE [ARGS …]")
    if taken := [name for name in command[1:] if name.partition("=")[0] in options.own]:
        tell(f"dlspeed: {' '.join(taken)} goes to {command[0]}; what {options.command} takes stands before it")
    return command if options.module else existing(command)


def existing(command: list[str]) -> list[str]:
    if not Path(command[0]).is_file():
        raise Wrong(f"there is no script {command[0]}")
    return command


def script_failed(error: Exception, options: argparse.Namespace) -> int:
    """Show an error of the script's own as Python would."""
    from ..script.running import script_frames

    frames = script_frames(error.__traceback__)
    if options.module and frames is None and isinstance(error, ImportError):
        return fail(error, 2)
    sys.excepthook(type(error), error.with_traceback(frames), frames)
    return 1


def diagnosed(profile: Path, html: Path | None) -> "Diagnosis":
    """The diagnosis of a profile or a folder; its page is written, if it is asked for."""
    from ..findings.diagnose import read_and_diagnose

    diagnosis, trace = read_and_diagnose(profile)
    if html:
        from ..findings.page import page
        from ..lab import files

        files.write(html, page(diagnosis, trace))
    return diagnosis
