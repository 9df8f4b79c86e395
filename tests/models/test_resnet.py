"""ResNet: plain functions as oracle."""

import pytest
import torch
import torch.nn.functional as F

from helpers.models import ResNet


def test_it_computes_what_plain_functions_do():
    model, x = ResNet((1, 1), 4, 5), torch.randn(2, 3, 40, 36)
    model.train()(torch.randn(4, 3, 40, 36))  # running statistics
    state = model.eval().state_dict()
    result = model(x)

    def conv(x, name, **options):
        return F.conv2d(x, state[f"{name}.weight"], **options)

    def normed(x, name):
        parts = (state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *parts)

    x = F.max_pool2d(F.relu(normed(conv(x, "conv1", stride=2, padding=3), "bn1")), 3, 2, 1)
    for name, stride in (("stages.0.0.", 1), ("stages.1.0.", 2)):
        y = F.relu(normed(conv(x, f"{name}conv1", stride=stride, padding=1), f"{name}bn1"))
        y = normed(conv(y, f"{name}conv2", padding=1), f"{name}bn2")
        if stride == 2:
            x = normed(conv(x, f"{name}downsample.0", stride=2), f"{name}downsample.1")
        x = F.relu(x + y)
    torch.testing.assert_close(result, F.linear(x.mean((2, 3)), state["fc.weight"], state["fc.bias"]))


def test_gradients_keep_their_size_through_a_convolution_at_the_start():
    """Through a ReLU half of them pass; the deviation √(2 / fan out) makes up for that."""
    conv = ResNet((1,), 32).stages[0][0].conv1
    x = torch.randn(8, 32, 24, 24, requires_grad=True)
    F.relu(conv(x)).backward(gradient := torch.randn(8, 32, 24, 24))
    assert (x.grad.std() / gradient.std()).item() == pytest.approx(1.0, abs=0.1)
