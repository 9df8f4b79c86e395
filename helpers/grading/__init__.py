"""Grading: a student's solutions against the chapters' checks, each in a process of its own.

    from helpers.grading import grade
    print(grade(["solution.ipynb"])[0].text())

A solution can hang, crash, print, exit, allocate or delete: it costs its own points. It runs in a fork of a process
that has torch loaded, with limits of time and memory; it writes nowhere but in its folder where the kernel has
Landlock. What it computed is compared in this process, which it can't reach.
"""

from .exercises import EXERCISES, Exercise
from .grade import Graded, Limits, Submission, grade

__all__ = ["EXERCISES", "Exercise", "Graded", "Limits", "Submission", "grade"]
