import torch as th


class MyScaler(object):
    """arithmetic with 0/1 flags for the scale, foreach ops for the rest"""

    def __init__(self, init_scale=65536., growth_factor=2., backoff_factor=.5, growth_interval=2000):
        self.S = th.full((), init_scale)
        self.n = th.zeros(())
        self.cfg = (growth_factor, backoff_factor, growth_interval)

    def scale(self, loss): return self.S * loss

    def get_scale(self): return float(self.S)

    def step(self, opt):
        params = []
        for g in opt.param_groups:
            params.extend([p for p in g['params'] if p.grad is not None])
        grads = [p.grad for p in params]
        th._foreach_mul_(grads, 1 / self.S)
        total = sum(th._foreach_norm(grads))
        self.ok = th.isfinite(total)
        with th.no_grad():
            old = [p.detach().clone() for p in params]
            old_state = {(p, k): v.clone() for p in params for k, v in opt.state[p].items() if isinstance(v, th.Tensor)}
            opt.step()
            for p, o in zip(params, old):
                p.data = th.where(self.ok, p.data, o)
            for (p, k), v in old_state.items():
                opt.state[p][k] = th.where(self.ok, opt.state[p][k], v)

    def update(self):
        grow, back, every = self.cfg
        self.n = th.where(self.ok, self.n + 1, th.zeros(()))
        hit = (self.n >= every).float()
        self.S = self.S * th.where(self.ok, 1 + hit * (grow - 1), th.tensor(back))
        self.n = self.n * (1 - hit)
