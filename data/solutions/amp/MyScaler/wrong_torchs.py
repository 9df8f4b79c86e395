# Torch's own scaler, inherited.
# says: torch.amp.GradScaler is what this exercise asks for
import torch


class MyScaler(torch.amp.GradScaler):
    def __init__(self, **options):
        super().__init__("cpu", **options)
