"""What chapter 3 measures: where the time of two slow pipelines goes, what each fix brings, what a diagnosis finds.

`size` is a preset of the pipelines: "small" for tests, "cpu", "gpu" for one of 8 GB, "full" for a big GPU.
"""

from .fixes import gpt_fixes, vit_fixes
from .strangers import gpu_gains, gpu_loops, loops, peers
from .trials import nulls, slowdowns
from .tried import tried
from .two_loops import PARTS, diagnose, modules, predicted, timeline
from .whole import whole_runs
