"""Chapter 4's tables, a file each."""

from .ceilings import ceilings  # isort: skip
from .peers import peers  # isort: skip
from .accuracy import accuracy  # isort: skip
from .sweep import growth, sweep  # isort: skip
