"""The trainer: its loop, precision, the tasks (language model, cars, clothes), deliberately slow variants, the stages.

trainer, loop      a step and a validation; epochs, timing, a profiler around them
precision, setup   fp32 to fp16 with a scaler; a plain training by a setup, with checkpoints
language, text_batches, cars, clothes    the tasks: data, model, loss, sizes
switches, slow_parts, switched    inefficiencies and their fixes; slow modules; trainings with any subset of fixes
stages             chapter 0: the language model's training with the fixes of one chapter after another
"""

from .loop import Excerpt, Step, fit
from .precision import PRECISIONS, Precision
from .setup import Setup, build, build_task, train
from .switched import CLOTHES, LANGUAGE
from .trainer import Batch, Task, Trainer

__all__ = [
    "CLOTHES",
    "LANGUAGE",
    "PRECISIONS",
    "Batch",
    "Excerpt",
    "Precision",
    "Setup",
    "Step",
    "Task",
    "Trainer",
    "build",
    "build_task",
    "fit",
    "train",
]
