"""The tool's own trials: what `profile` names in loops with a planted fault, in real reports and strangers' scripts."""

from .loops import loops  # isort: skip
from .profilers import profilers  # isort: skip
from .strangers import strangers  # isort: skip
