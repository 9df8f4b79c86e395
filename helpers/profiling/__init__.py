"""Where a training loop's time goes, and what is slow in it.

    ModuleProfiler    forward and backward time and memory of every module, by hooks; a table, and a trace for Perfetto
    diagnose          findings in a profile or a saved trace: what, where, how much it costs, what to do

The two pipelines that chapter 3 is about, slow on purpose, are `vit_pipeline` and `gpt_pipeline`.
"""

from .diagnose import diagnose
from .module_profiler import ModuleProfiler

__all__ = ["ModuleProfiler", "diagnose"]
