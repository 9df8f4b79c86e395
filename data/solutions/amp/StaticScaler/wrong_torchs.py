# Torch's scaler does it.
# says: torch.amp.GradScaler is what this exercise asks for
import torch


class StaticScaler:
    def __init__(self, scale=2.0**12):
        self.inner = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**9)
        self.scale, self.step, self.update = self.inner.scale, self.inner.step, self.inner.update
