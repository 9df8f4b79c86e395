"""Steps that are written anew and do the same work: `REFACTORINGS[name](changed)` builds one."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

X, Y = torch.randn(64, 32), torch.randint(0, 8, (64,))


def network():
    net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 8))
    return net, torch.optim.AdamW(net.parameters(), fused=True)


def trained(loss_of, net=None, optimizer=None):
    """A step with this loss of the network."""
    net, optimizer = (net, optimizer) if net is not None else network()

    def step():
        optimizer.zero_grad()
        loss_of(net, X, Y).backward()
        optimizer.step()

    return step


def renamed_variables(changed):
    def before(net, x, y):
        logits = net(x)
        loss = F.cross_entropy(logits, y)
        return loss

    def after(network, inputs, labels):
        outputs = network(inputs)
        criterion = F.cross_entropy(outputs, labels)
        return criterion

    return trained(after if changed else before)


def split_function(changed):
    def before(net, x, y):
        x = (x - x.mean(0)) / x.std(0)
        return F.cross_entropy(net(x), y)

    def normalized(x):
        return (x - x.mean(0)) / x.std(0)

    def after(net, x, y):
        return F.cross_entropy(net(normalized(x)), y)

    return trained(after if changed else before)


def joined_functions(changed):
    return split_function(not changed)


def moved_into_a_class(changed):
    class Loss:
        def __init__(self, weight):
            self.weight = weight

        def __call__(self, net, x, y):
            return self.weight * F.cross_entropy(net(x), y)

    return trained(Loss(0.5) if changed else lambda net, x, y: 0.5 * F.cross_entropy(net(x), y))


def other_order(changed):
    def before(net, x, y):
        wide = x.sin()
        narrow = x.cos()
        return F.cross_entropy(net(wide + narrow), y)

    def after(net, x, y):
        narrow = x.cos()
        wide = x.sin()
        return F.cross_entropy(net(wide + narrow), y)

    return trained(after if changed else before)


def module_for_functional(changed):
    act, loss = nn.ReLU(), nn.CrossEntropyLoss()

    def before(net, x, y):
        return F.cross_entropy(F.relu(net(x)), y)

    def after(net, x, y):
        return loss(act(net(x)), y)

    return trained(after if changed else before)


def method_for_function(changed):
    def before(net, x, y):
        return torch.mean(torch.square(net(x)))

    def after(net, x, y):
        return net(x).square().mean()

    return trained(after if changed else before)


def operator_for_function(changed):
    def before(net, x, y):
        return F.cross_entropy(torch.add(net(x), torch.mul(net(x), 2.0)), y)

    def after(net, x, y):
        return F.cross_entropy(net(x) + net(x) * 2.0, y)

    return trained(after if changed else before)


def sequential_for_forward(changed):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 8)

        def forward(self, x):
            return self.down(F.gelu(self.up(x)))

    net = network()[0] if changed else Net()
    return trained(lambda net, x, y: F.cross_entropy(net(x), y), net, torch.optim.AdamW(net.parameters(), fused=True))


def loop_for_unrolled(changed):
    def before(net, x, y):
        x = x.tanh()
        x = x.tanh()
        x = x.tanh()
        return F.cross_entropy(net(x), y)

    def after(net, x, y):
        for _ in range(3):
            x = x.tanh()
        return F.cross_entropy(net(x), y)

    return trained(after if changed else before)


def comprehension_for_loop(changed):
    def before(net, x, y):
        parts = []
        for part in x.chunk(4):
            parts.append(net(part))
        return F.cross_entropy(torch.cat(parts), y)

    def after(net, x, y):
        return F.cross_entropy(torch.cat([net(part) for part in x.chunk(4)]), y)

    return trained(after if changed else before)


def views_otherwise(changed):
    def before(net, x, y):
        return F.cross_entropy(net(x.view(64, 4, 8).transpose(0, 1).transpose(0, 1).reshape(64, 32)), y)

    def after(net, x, y):
        return F.cross_entropy(net(x.unflatten(1, (4, 8)).permute(1, 0, 2).permute(1, 0, 2).flatten(1)), y)

    return trained(after if changed else before)


def partial_for_lambda(changed):
    def loss(net, x, y, scale):
        return F.cross_entropy(net(x), y) * scale

    return trained(functools.partial(loss, scale=2.0) if changed else lambda net, x, y: loss(net, x, y, 2.0))


def decorated(changed):
    def logged(function):
        @functools.wraps(function)
        def called(*arguments):
            return function(*arguments)

        return called

    def loss(net, x, y):
        return F.cross_entropy(net(x), y)

    return trained(logged(loss) if changed else loss)


def gradients_zeroed_after(changed):
    net, optimizer = network()

    def before():
        optimizer.zero_grad()
        F.cross_entropy(net(X), Y).backward()
        optimizer.step()

    def after():
        F.cross_entropy(net(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return after if changed else before


def a_class_for_a_closure(changed):
    class Trainer:
        def __init__(self):
            self.net, self.optimizer = network()

        def loss(self, x, y):
            return F.cross_entropy(self.net(x), y)

        def __call__(self):
            self.optimizer.zero_grad()
            self.loss(X, Y).backward()
            self.optimizer.step()

    return Trainer() if changed else trained(lambda net, x, y: F.cross_entropy(net(x), y))


def loss_kept_detached(changed):
    net, optimizer = network()
    last = []

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(X), Y)
        loss.backward()
        optimizer.step()
        if changed:
            last[:] = [loss.detach()]

    return step


def no_grad_as_decorator(changed):
    net, optimizer = network()
    right = torch.zeros((), dtype=torch.long)

    def count(logits):
        with torch.no_grad():
            right.add_((logits.argmax(1) == Y).sum())

    counted = torch.no_grad()(lambda logits: right.add_((logits.argmax(1) == Y).sum())) if changed else count

    def step():
        optimizer.zero_grad()
        logits = net(X)
        counted(logits)
        F.cross_entropy(logits, Y).backward()
        optimizer.step()

    return step


def config_object(changed):
    class Config:
        scale, smoothing = 0.5, 0.1

    def before(net, x, y):
        return 0.5 * F.cross_entropy(net(x), y, label_smoothing=0.1)

    def after(net, x, y):
        config = Config()
        return config.scale * F.cross_entropy(net(x), y, label_smoothing=config.smoothing)

    return trained(after if changed else before)


def checks_and_types(changed):
    def before(net, x, y):
        return F.cross_entropy(net(x), y)

    def after(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        assert x.dim() == 2 and len(x) == len(y), "a batch of samples and a class of each"
        assert isinstance(x, torch.Tensor) and x.dtype == torch.float32
        return F.cross_entropy(net(x), y)

    return trained(after if changed else before)


_PARTS = {"network", "trained"}
REFACTORINGS = {
    name: build
    for name, build in list(globals().items())
    if getattr(build, "__module__", "") == __name__ and name not in _PARTS
}
