"""The tool's own trials, a table a file: what `profile` names, what `try` gains, what trials of equals say."""

from .loops import loops  # isort: skip
from .peers import peers  # isort: skip
from .gpu_loops import gpu_loops  # isort: skip
from .nulls import nulls  # isort: skip
from .tried import tried  # isort: skip
