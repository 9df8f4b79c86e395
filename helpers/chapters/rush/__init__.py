"""Chapter 5's tables, a file each."""

from .without import without  # isort: skip
from .checkpointing import checkpointing  # isort: skip
from .device_time import device_time  # isort: skip
from .norms import norms  # isort: skip
from .adam import adam  # isort: skip
from .lecture import lecture  # isort: skip
from .ladder import ladder  # isort: skip
from .peers import peers  # isort: skip
from .pairs import pairs  # isort: skip
from .allocator import allocator  # isort: skip
from .distributed import distributed  # isort: skip
from .memory_plan import memory_plan  # isort: skip
from .predicted import predicted  # isort: skip
from .task_steps import task_steps  # isort: skip
