"""Chapter 3: what the diagnosis finds, whether its promises are kept, where a step's time goes, what each fix gains."""

from .strangers import MATCH, baselines, gpu_loops, loops, nulls, peers, slowdowns, tried
from .two_loops import MARGIN, NAMES, diagnose, gpt_fixes, modules, predicted, timeline, vit_fixes, whole_runs

__all__ = ["MARGIN", "MATCH", "NAMES", "baselines", "diagnose", "gpt_fixes", "gpu_loops", "loops", "modules", "nulls"]
__all__ += ["peers", "predicted", "slowdowns", "timeline", "tried", "vit_fixes", "whole_runs"]
