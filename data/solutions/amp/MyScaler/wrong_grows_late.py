# Off by one: the scale grows when the count has passed the interval.
# says: the scale grows after 7 good steps: after step 6 the scale is 1024, and not torch's
import torch


class MyScaler:
    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.s = torch.tensor(float(init_scale))
        self.n = torch.tensor(0)
        self.growth, self.backoff, self.interval = growth_factor, backoff_factor, growth_interval

    def scale(self, loss):
        return loss * self.s

    def step(self, optimizer):
        ps = [p for g in optimizer.param_groups for p in g["params"]]
        for p in ps:
            p.grad /= self.s
        self.finite = torch.stack([torch.isfinite(p.grad).all() for p in ps]).all()
        tensors = ps + [v for p in ps for v in optimizer.state[p].values()]
        saved = [t.detach().clone() for t in tensors]
        optimizer.step()
        for t, s in zip(tensors, saved):
            t.data.copy_(torch.where(self.finite, t.data, s))

    def update(self):
        n = torch.where(self.finite, self.n + 1, 0)
        grow = n > self.interval
        self.s = torch.where(self.finite, torch.where(grow, self.s * self.growth, self.s), self.s * self.backoff)
        self.n = torch.where(grow, 0, n)

    def get_scale(self):
        return float(self.s)
