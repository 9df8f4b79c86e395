"""The tool's own trials: what `profile` names in loops with a planted fault."""

from .loops import loops  # isort: skip
