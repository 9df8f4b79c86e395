"""The tool's own trials, a table a file: what `profile` names, and what `try` gains."""

from .loops import loops  # isort: skip
from .peers import peers  # isort: skip
from .tried import tried  # isort: skip
