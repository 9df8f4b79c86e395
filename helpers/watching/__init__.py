"""A training script as it is, run in this process: observed line by line, and recorded for a few iterations.

    watch    runs a script or module, observes its loop, and saves the profiles of a few iterations

`helpers.profiling` reads what was recorded; `helpers.trying` runs a script's copies in turns.
"""

from .watch import NothingRecorded, Recording, watch

__all__ = ["NothingRecorded", "Recording", "watch"]
