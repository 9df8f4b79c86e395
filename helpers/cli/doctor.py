"""`dlspeed doctor`."""

import argparse

from .shared import add_results

ABOUT = "What this machine is, what is installed, and what has been recorded on it."


def add_options(parser: argparse.ArgumentParser) -> None:
    add_results(parser)
    parser.add_argument("--wanted", action="store_true", help="only list what tables want and lack, as pip takes it")


def run(options: argparse.Namespace) -> int:
    from ..doctor import FAULT, findings, wanted

    if options.wanted:
        print(*wanted(), sep="\n")
        return 0
    sound = True
    for name, finding in findings(options.results):
        print(f"{name:<28}{finding}")
        sound = sound and not finding.startswith(FAULT)
    return 0 if sound else 1
