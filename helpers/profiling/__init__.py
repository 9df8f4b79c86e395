"""Where a training loop's time goes, and what is slow in it.

    ModuleProfiler    forward and backward time and memory of every module, by hooks; a table
    diagnose          where a step's time goes, what to change first, and what it could bring, from a profile

The two trainings that chapter 3 is about, slow on purpose, are `CLOTHES` and `LANGUAGE` of `helpers.training`.
"""

from ..findings.diagnose import diagnose
from .module_profiler import ModuleProfiler

__all__ = ["ModuleProfiler", "diagnose"]
