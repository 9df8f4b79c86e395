"""Chapter 3's tables: where the time of two slow loops goes, what each fix brings, what a diagnosis finds.

`size` is a preset of the pipelines: "small" for tests, "cpu", "gpu" for one of 8 GB, "full" for a big GPU.
"""

from .fixes import gpt_fixes, vit_fixes  # isort: skip
from .diagnose import diagnose  # isort: skip
from .modules import modules  # isort: skip
from .timeline import timeline  # isort: skip
