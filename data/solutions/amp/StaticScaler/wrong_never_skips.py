# A step with inf or NaN in a gradient is taken.
# says: a step with inf in a gradient is skipped
class StaticScaler:
    def __init__(self, scale=2.0**12):
        self.factor = scale

    def scale(self, loss):
        return loss * self.factor

    def step(self, optimizer):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad /= self.factor
        optimizer.step()

    def update(self):
        pass
