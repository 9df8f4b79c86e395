"""`dlspeed referee CASES …`."""

import argparse
from pathlib import Path

from .shared import Wrong, add_json, fail, positive, tell

ABOUT = "Judge edited training scripts: the same training still, and how much faster?"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("cases", type=Path, metavar="CASES", help="a case's folder, or one of many such folders")
    about = "a folder of CASE.py or CASE.patch files"
    add("submission", type=Path, nargs="?", metavar="SUBMISSION", help=about)
    add("--check", action="store_true", help="prove that each case's own fix is the same and faster")
    add("--seconds", type=positive, default=60.0, metavar="S", help="for a paired trial at most (default: 60)")
    add_json(parser)
    add("--page", type=Path, metavar="FILE", help="write an HTML page as well")


def run(options: argparse.Namespace) -> int:
    from ..lab import files
    from ..refereeing import cases, judging, score

    if bool(options.submission) == options.check:
        raise Wrong("referee what? CASES SUBMISSION, or --check CASES")
    if options.submission and not options.submission.is_dir():
        raise Wrong(f"{options.submission} is no folder")
    try:
        known = cases.read_cases(options.cases)
        if options.check:
            faults = [fault for case in known for fault in judging.check(case, options.seconds, tell)]
            return fail("; ".join(faults), 1) if faults else 0
        results = score.Results(judging.judge_all(known, options.submission, options.seconds, tell))
    except cases.WrongCase as error:
        return fail(error, 1)
    print(results.json() if options.json else results.text())
    if options.page:
        files.write(options.page, results.page(options.submission.name))
    return 0
