"""The trainer: its loop, precision, the tasks (language model, cars, clothes), deliberately slow variants, the stages.

trainer            the trainer of anything: the optimizer's step, a step's capture
task, loop         a task's trainer, in a precision; epochs, timing, a profiler
language, text_batches, cars, clothes    the tasks: data, model, loss; their sizes in `sizes.toml`
switches, slow_parts, switched    what is slow on purpose, and the fixes; its modules; trainings with any of the fixes
stages             chapter 0: the language model's training with the fixes of one chapter after another
"""

from .loop import Step, fit
from .switched import CLOTHES, LANGUAGE
from .task import PRECISIONS, Batch, Precision, Task, TaskTrainer
from .trainer import Trainer

__all__ = ["CLOTHES", "LANGUAGE", "PRECISIONS", "Batch", "Precision", "Step", "Task", "TaskTrainer", "Trainer", "fit"]
