"""`dlspeed grade FILE|FOLDER …`."""

import argparse
import json
from pathlib import Path

from .shared import add_json, fail, positive, tell

ABOUT = "Run students' notebooks and judge their exercises, each notebook in a process of its own."


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("submission", type=Path, nargs="+", metavar="FILE|FOLDER", help="notebooks or scripts")
    add("--chapter", type=int, choices=range(1, 8), help="all of its exercises (default: of all that are in a file)")
    about = "of CPU time for a cell or an exercise (default: 20); all cells of a file have 60"
    add("--seconds", type=positive, default=20.0, metavar="S", help=about)
    add("--memory", type=positive, default=2.0, metavar="GIB", help="for each (default: 2)")
    add("--seed", type=int, metavar="N", help="that checks draw their inputs from (default: random)")
    add("--csv", type=Path, metavar="FILE", help="write a row for each student and exercise")
    add("--pages", type=Path, metavar="DIR", help="write each student's answers in words as a page for the teacher")
    add("--gradescope", type=Path, metavar="FILE", help="write a student's points as Gradescope's results.json")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from .. import grading
    from ..grading.grade import gradescope, table, write_csv

    given = options.submission
    many = len(given) > 1 or given[0].is_dir()
    folders = [
        sorted(path for path in one.iterdir() if path.suffix in (".ipynb", ".py")) for one in given if one.is_dir()
    ]
    paths = [one for one in given if not one.is_dir()] + [path for folder in folders for path in folder]
    limits = grading.Limits(options.seconds, options.memory)
    submissions = grading.grade(paths, options.chapter, limits, options.seed)
    if options.gradescope:
        options.gradescope.write_text(json.dumps(gradescope(submissions), indent=1), encoding="utf-8")
    if not any(each.graded for each in submissions):
        faults = [fault for each in submissions for fault in each.faults]
        return fail(f"no exercise is in {given[0]}{': ' if faults else ''}{'; '.join(faults)}", 2)
    if options.csv:
        write_csv(submissions, options.csv)
    if options.pages:
        grading.write_pages(submissions, options.pages)
    if options.json:
        rows = [each.row() for each in submissions]
        print(json.dumps(rows if many else rows[0], indent=1))
    else:
        print(table(submissions) if many else submissions[0].text())
    tell(f"dlspeed: not limited on this machine: {', '.join(grading.not_limited())}")
    return 0 if many or submissions[0].points == submissions[0].most else 1
