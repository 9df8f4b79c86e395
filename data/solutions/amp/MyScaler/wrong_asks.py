# Right, but it asks Python whether to step.
# says: step and update read no number of a tensor: 40 in 40 steps
import torch


class MyScaler:
    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.factor, self.good = init_scale, 0
        self.growth, self.backoff, self.every = growth_factor, backoff_factor, growth_interval

    def scale(self, loss):
        return loss * self.factor

    def step(self, optimizer):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for grad in grads:
            grad.div_(self.factor)
        self.finite = bool(torch.stack([grad.isfinite().all() for grad in grads]).all())
        if self.finite:
            optimizer.step()

    def update(self):
        self.good = self.good + 1 if self.finite else 0
        if not self.finite:
            self.factor *= self.backoff
        elif self.good == self.every:
            self.factor, self.good = self.factor * self.growth, 0

    def get_scale(self):
        return self.factor
