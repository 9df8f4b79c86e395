"""Grading: students' notebooks against the chapters' checks, each in a process of its own.

    from helpers.grading import grade
    print(grade(["solution.ipynb"])[0].text())

A submission can hang, crash, print, exit, allocate or delete: it costs the points of the cell or the exercise that
does it. It runs in a fork of a process that has torch loaded, with limits of time and memory; where the kernel has
Landlock it writes nowhere but in its folder, and reads neither right answers nor others' submissions. What it computed
is compared in this process, which it can't reach.
"""

from .exercises import EXERCISES, Exercise
from .grade import Graded, Limits, Submission, grade, not_limited
from .words import write_pages

__all__ = ["EXERCISES", "Exercise", "Graded", "Limits", "Submission", "grade", "not_limited", "write_pages"]
