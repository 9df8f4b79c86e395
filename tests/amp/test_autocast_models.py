"""Outputs and gradients of whole models, checkpointed ones too, under `Autocast` are those under torch.autocast."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.amp import Autocast
from helpers.models import GPT2LikeModel, Llama, UNet, ViT

BF16 = torch.bfloat16
WIDTH = 16


class Attention(nn.MultiheadAttention):
    def __init__(self):
        super().__init__(WIDTH, 2, batch_first=True)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return super().forward(x, x, x, attn_mask=mask)[0]


def encoder():
    return nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)


def block():
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, WIDTH))


def tokens():
    return torch.arange(48).view(2, 24)


MODELS = {
    "mlp": (block, torch.randn(3, 6, WIDTH)),
    "attention": (Attention, torch.randn(3, 6, WIDTH)),
    "encoder": (encoder, torch.randn(3, 6, WIDTH)),
    "unet": (lambda: UNet(width=4, depth=2), torch.randn(2, 3, 32, 32)),
    "vit": (lambda: ViT(image_size=32, patch_size=8, width=32, depth=2), torch.randn(2, 3, 32, 32)),
    "gpt2": (lambda: GPT2LikeModel(97, 32, 2, 2, max_length=24), tokens()),
    "llama": (lambda: Llama(97, 32, 2, 4, 2, 64), tokens()),
}


def run(model, inputs, region):
    """The outputs and the gradients of the inputs and the weights."""
    torch.manual_seed(0)
    model.zero_grad()
    if inputs.is_floating_point():
        inputs = inputs.clone().requires_grad_()
    with region:
        y = model(inputs)
        y = getattr(y, "last_hidden_state", y)
        loss = F.mse_loss(y, torch.zeros_like(y)) * 100
    loss.backward()
    return [y, loss, inputs.grad, *(parameter.grad for parameter in model.parameters())]


def assert_same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "dtype"), [*((name, BF16) for name in MODELS), ("unet", torch.float16)])
def test_outputs_and_gradients_equal_those_under_torch_autocast(name, dtype):
    build, inputs = MODELS[name]
    model = build()
    assert_same(run(model, inputs, Autocast(dtype)), run(model, inputs, torch.autocast("cpu", dtype)))


def test_inference_takes_no_fused_path_that_the_mode_does_not_see():
    model, x = encoder().eval(), torch.randn(3, 6, WIDTH)
    with torch.inference_mode(), Autocast(BF16):
        assert model(x).dtype == torch.float32
        assert model.self_attn(x, x, x)[0].dtype == BF16


@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_models_of_transformers_equal_those_under_torch_autocast(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 97}
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes))
    model.train().gradient_checkpointing_enable()
    assert_same(run(model, tokens(), Autocast(BF16)), run(model, tokens(), torch.autocast("cpu", BF16)))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_in_the_low_type(kind):
    layer, x = kind(WIDTH, WIDTH, num_layers=2, bidirectional=True), torch.randn(6, 3, WIDTH)
    low = kind(WIDTH, WIDTH, num_layers=2, bidirectional=True).to(BF16)
    low.load_state_dict(layer.state_dict())
    with Autocast(BF16):
        y, _ = layer(x)
    expected, _ = low(x.to(BF16))
    y.float().square().mean().backward()
    expected.float().square().mean().backward()
    grads = [[parameter.grad.float() for parameter in one.parameters()] for one in (layer, low)]
    assert_same([y, *grads[0]], [expected, *grads[1]])


@pytest.mark.parametrize("backward_within", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_recomputes_what_the_forward_did(use_reentrant, backward_within):
    model = block()

    def inner(x):
        with Autocast(enabled=False):
            x = model(x.float())
        with torch.autocast("cpu", enabled=False):
            x = x @ x.transpose(-1, -2) @ x
        return model(checkpoint(model, x, use_reentrant=use_reentrant))

    def gradients(region, forward):
        torch.manual_seed(0)
        model.zero_grad()
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).requires_grad_()
        with region:
            loss = forward(x).float().square().sum()
            if backward_within:
                loss.backward()
        if not backward_within:
            loss.backward()
        return [x.grad, *(parameter.grad for parameter in model.parameters())]

    def recomputed(x):
        return checkpoint(inner, x, use_reentrant=use_reentrant)

    ours = gradients(Autocast(BF16), recomputed)
    torch.testing.assert_close(ours, gradients(Autocast(BF16), inner), rtol=1e-5, atol=1e-5)
    if not backward_within:  # torch.autocast would cast in backward, too
        assert_same(ours, gradients(torch.autocast("cpu", BF16), recomputed))
