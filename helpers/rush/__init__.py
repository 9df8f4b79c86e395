"""Chapter 5: the optimization rush, from one GPU to many."""

from .measurement import run
from .setup import CPU_LADDER, LADDER, Setup, climb, rung, stands_on
from .trainer import build_trainer

__all__ = ["CPU_LADDER", "LADDER", "Setup", "build_trainer", "climb", "run", "rung", "stands_on"]
