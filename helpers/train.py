"""Train a task in a chosen precision: what chapters 1 and 2 share. The trainer itself is `helpers.training`.

python -m helpers train --task segmentation --precision dynamic --epochs 5 --seed 0
python -m helpers train --stages "mixed precision,batching" --epochs 1      # chapter 0: `helpers.training.stages`
>>> from helpers.train import Setup, train
>>> train(Setup(task="lm", precision="bf16", preset="small"))
"""

from helpers.training.loop import Step
from helpers.training.precision import PRECISIONS
from helpers.training.setup import Setup, build, build_task, train
from helpers.training.text_batches import DATA

__all__ = ["DATA", "PRECISIONS", "Setup", "Step", "build", "build_task", "train"]
