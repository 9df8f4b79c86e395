"""The tool's own trials: what `profile` names in loops with a planted fault and in scripts after real reports."""

from .loops import loops  # isort: skip
from .profilers import profilers  # isort: skip
