"""Paired trials: a change is measured in turns with what it is compared with, A B B A, and its ratio has an interval.

    from helpers.lab.trials import Program, trial

    trial(Program("one thread", function="bench:step", environment={"OMP_NUM_THREADS": "1"}),
          Program("two threads", function="bench:step", environment={"OMP_NUM_THREADS": "2"}), seconds=30)

Functions that can live in one process are compared there: `lab.compare`.
"""

from ...boot import when_used
from ..estimate import FASTER, SLOWER, Estimate, estimate

__all__ = ["FASTER", "SLOWER", "Estimate", "Program", "ProgramError", "estimate", "trial"]
__getattr__ = when_used(__name__, {"paired": "trial", "programs": "Program ProgramError"})
