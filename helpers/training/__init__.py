"""The trainer: its loop, precision, the tasks (language model, cars, clothes), deliberately slow variants, the stages.

step, trainer, loop    the step and its capture; training and validation in a precision; epochs, timing, a profiler
language, text_batches, cars, clothes    the tasks: data, model, loss, sizes
faults, slow_parts, switches, switched    what is slow on purpose; its modules; the fixes; trainings with any of them
stages             chapter 0: the language model's training with the fixes of one chapter after another
"""

from .loop import Excerpt, Step, fit
from .step import TrainingStep
from .switched import CLOTHES, LANGUAGE
from .trainer import PRECISIONS, Batch, Precision, Task, Trainer

__all__ = [
    "CLOTHES",
    "LANGUAGE",
    "PRECISIONS",
    "Batch",
    "Excerpt",
    "Precision",
    "Step",
    "Task",
    "Trainer",
    "TrainingStep",
    "fit",
]
