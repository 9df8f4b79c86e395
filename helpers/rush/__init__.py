"""Chapter 5: the optimization rush, from one GPU to many."""

from .ladder import LADDER, climb, stands_on
from .run import loss_curve, run
from .setup import Setup
from .training import Trainer

__all__ = ["LADDER", "Setup", "Trainer", "climb", "loss_curve", "run", "stands_on"]
