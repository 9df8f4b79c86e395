"""The U-Net: any size in, the same size out, and able to learn."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.models import UNet


@settings(max_examples=6, deadline=None)
@given(
    depth=st.integers(0, 3),
    extra=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    channels=st.tuples(st.integers(1, 4), st.integers(1, 3)),
)
def test_logits_are_as_large_as_the_image_whatever_its_size(depth, extra, channels):
    height, width = (2**depth + more for more in extra)
    network = UNet(channels[0], channels[1], width=3, depth=depth)
    logits = network(torch.randn(2, channels[0], height, width))
    assert logits.shape == (2, channels[1], height, width)
    assert logits.isfinite().all()


def test_activations_keep_their_size_through_the_depth_at_the_start():
    network, sizes = UNet(width=32, depth=3), []
    for module in [*network.up, network.head]:
        module.register_forward_hook(lambda module, inputs, output: sizes.append((inputs[0].std(), output.std())))
    network(torch.randn(4, 3, 32, 32))
    assert len(sizes) == 4
    for before, after in sizes:
        assert 0.5 < after / before < 2.5
