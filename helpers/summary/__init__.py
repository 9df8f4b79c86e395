"""Chapter 0: what all stages bring together, and every goal beside what was reached."""

from .goals import GOALS, Goal, against_records
from .stages import STAGES, Stage, run

__all__ = ["GOALS", "STAGES", "Goal", "Stage", "against_records", "run"]
