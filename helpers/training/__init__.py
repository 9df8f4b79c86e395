"""The one trainer: its loop, precision, the tasks (language model, cars, clothes), what is slow on purpose, the stages.

trainer, loop      what a step and a validation do; epochs, the clock, a profiler around them
precision, setup   fp32 to fp16 with a scaler; a plain training by a setup, with checkpoints
language, text_batches, cars, clothes    the tasks: data, model, loss, sizes
switches, slow_parts, switched    what is slow on purpose and what mends it; the planted parts; trainings of any subset
stages             chapter 0: the language model's training with one chapter's remedies after another
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
