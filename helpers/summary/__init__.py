"""Chapter 0: what all stages bring together, and every goal beside what was reached."""

from helpers.training.stages import STAGES, Stage, run

from .goals import GOALS, Goal, against_records

__all__ = ["GOALS", "STAGES", "Goal", "Stage", "against_records", "run"]
