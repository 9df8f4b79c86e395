"""What can be trained: a language model and a segmentation network, each with its data, loss and accuracy."""

from .language import DATA, language_task
from .pictures import segmentation_task
from .task import Batch, Task

TASKS = {"lm": language_task, "segmentation": segmentation_task}

__all__ = ["DATA", "TASKS", "Batch", "Task"]
