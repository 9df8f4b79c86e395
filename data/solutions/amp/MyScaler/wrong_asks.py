# Right, but it asks Python whether to step.
# says: step and update read no number of a tensor: 40 in 40 steps
import torch


class MyScaler(torch.amp.GradScaler):
    def __init__(self, **options):
        super().__init__("cpu", **options)
