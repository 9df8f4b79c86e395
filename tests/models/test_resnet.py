"""ResNet: plain functions as oracle, torchvision's names, and nothing that a compiler could trip over."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers.models import ResNet
from helpers.models.resnet import Block


@settings(max_examples=10, deadline=None)
@given(
    blocks=st.lists(st.integers(1, 2), min_size=1, max_size=3),
    width=st.integers(1, 5),
    side=st.integers(16, 40),
    classes=st.integers(1, 4),
)
def test_logits_are_one_row_a_picture_whatever_the_sizes(blocks, width, side, classes):
    logits = ResNet(blocks, width, classes)(torch.randn(2, 3, side, side))
    assert logits.shape == (2, classes)
    assert logits.isfinite().all()


def from_torchvision(state):
    """A state dict of torchvision's `resnet18` or `resnet34` under our names: its `layer1` is our `stages.0`."""
    renamed = {}
    for name, tensor in state.items():
        first, _, rest = name.partition(".")
        if first.startswith("layer"):
            first = f"stages.{int(first.removeprefix('layer')) - 1}"
        renamed[f"{first}.{rest}"] = tensor
    return renamed


def torchvision_state(blocks, width, classes):
    """A state dict as torchvision writes it, of shapes by its rules and values that are all different."""
    shapes = {"conv1.weight": (width, 3, 7, 7), "fc.weight": (classes, width * 2 ** (len(blocks) - 1))}
    shapes |= {"fc.bias": (classes,)} | norm("bn1", width)
    for i, count in enumerate(blocks):
        after = width * 2**i
        for j in range(count):
            before = after if j or i == 0 else after // 2
            name = f"layer{i + 1}.{j}."
            shapes |= {f"{name}conv1.weight": (after, before, 3, 3), f"{name}conv2.weight": (after, after, 3, 3)}
            shapes |= norm(f"{name}bn1", after) | norm(f"{name}bn2", after)
            if before != after:
                shapes |= {f"{name}downsample.0.weight": (after, before, 1, 1)} | norm(f"{name}downsample.1", after)
    return {name: torch.rand(shape) for name, shape in shapes.items()}


def norm(name, width):
    return {f"{name}.{part}": (width,) for part in ("weight", "bias", "running_mean", "running_var")} | {
        f"{name}.num_batches_tracked": ()
    }


@pytest.mark.parametrize("blocks", [(2, 2, 2, 2), (1, 3)])
def test_torchvisions_weights_are_mapped_one_to_one(blocks):
    model, state = ResNet(blocks, 4, 5), torchvision_state(blocks, 4, 5)
    model.load_state_dict(from_torchvision(state))
    assert len(state) == len(model.state_dict())
    torch.testing.assert_close(model.stages[1][0].downsample[0].weight, state["layer2.0.downsample.0.weight"])


def test_it_computes_what_plain_functions_do_on_torchvisions_weights():
    state, x = torchvision_state((1, 1), 4, 5), torch.randn(2, 3, 40, 36)
    model = ResNet((1, 1), 4, 5).eval()
    model.load_state_dict(from_torchvision(state))

    def normed(x, name):
        parts = (state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *parts)

    found = model(x)
    x = F.max_pool2d(F.relu(normed(F.conv2d(x, state["conv1.weight"], stride=2, padding=3), "bn1")), 3, 2, 1)
    for name, stride in (("layer1.0.", 1), ("layer2.0.", 2)):
        y = F.relu(normed(F.conv2d(x, state[f"{name}conv1.weight"], stride=stride, padding=1), f"{name}bn1"))
        y = normed(F.conv2d(y, state[f"{name}conv2.weight"], padding=1), f"{name}bn2")
        if stride == 2:
            x = normed(F.conv2d(x, state[f"{name}downsample.0.weight"], stride=2), f"{name}downsample.1")
        x = F.relu(x + y)
    torch.testing.assert_close(found, F.linear(x.mean((2, 3)), state["fc.weight"], state["fc.bias"]))


def test_it_is_torchvisions_own():
    torchvision = pytest.importorskip("torchvision")
    theirs, x = torchvision.models.resnet18(weights=None).eval(), torch.randn(1, 3, 64, 64)
    ours = ResNet.from_name("resnet-18").eval()
    ours.load_state_dict(from_torchvision(theirs.state_dict()))
    torch.testing.assert_close(ours(x), theirs(x))


def test_a_block_that_keeps_the_shape_passes_its_input_on():
    block, x = Block(4, 4, 1).eval(), torch.rand(1, 4, 5, 5)
    nn.init.zeros_(block.bn2.weight)
    torch.testing.assert_close(block(x), x)


def test_gradients_keep_their_size_through_a_convolution_at_the_start():
    """Through a ReLU half of them pass; the deviation √(2 / fan out) makes up for that."""
    conv = ResNet((1,), 32).stages[0][0].conv1
    x = torch.randn(8, 32, 24, 24, requires_grad=True)
    F.relu(conv(x)).backward(gradient := torch.randn(8, 32, 24, 24))
    assert (x.grad.std() / gradient.std()).item() == pytest.approx(1.0, abs=0.1)
