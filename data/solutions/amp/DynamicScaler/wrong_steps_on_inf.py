# The scale falls, but the step is taken all the same.
# says: a step with inf in a gradient is skipped
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
        self.bad = not all(bool(torch.isfinite(grad).all()) for grad in grads)
        optimizer.step()

    def update(self):
        self.good = 0 if self.bad else self.good + 1
        if self.bad:
            self.factor *= self.backoff
        elif self.good == self.interval:
            self.factor, self.good = self.factor * self.growth, 0

    def get_scale(self):
        return self.factor
