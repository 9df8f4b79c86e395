import time

import torch


class Mark(torch.autograd.Function):
    """An identity whose backward calls something."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.call()
        return gradient, None


class MyProfiler:
    def __init__(self, model):
        self.modules = dict(model.named_modules())
        self.forward, self.backward = dict.fromkeys(self.modules, 0.0), dict.fromkeys(self.modules, 0.0)

    def wrapped(self, name, call):
        def forward(x):
            x = Mark.apply(x, lambda: self.add(self.backward, name, 1))
            self.add(self.forward, name, -1)
            y = call(x)
            self.add(self.forward, name, 1)
            return Mark.apply(y, lambda: self.add(self.backward, name, -1))

        return forward

    def add(self, times, name, sign):
        times[name] += sign * 1000 * time.perf_counter()

    def __enter__(self):
        for name, module in self.modules.items():
            module.forward = self.wrapped(name, module.forward)
        return self

    def __exit__(self, *exception):
        for module in self.modules.values():
            del module.forward

    def times(self):
        return {name: (self.forward[name], self.backward[name]) for name in self.modules}
