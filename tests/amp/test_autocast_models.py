"""Outputs and gradients of whole models, checkpointed ones too, under `Autocast` are those under torch.autocast."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from helpers.amp import Autocast
from helpers.lab.timing import relative_error

DTYPES = [torch.bfloat16, torch.float16]
WIDTH = 16


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, WIDTH), nn.Softmax(-1))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 2, 2), nn.PReLU()
        )

    def forward(self, x):  # (B, T, C) → (B, 1, T, C)
        return F.interpolate(self.body(x[:, None]), scale_factor=2, mode="bilinear")


class SelfAttention(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(WIDTH, 2, batch_first=True), need_weights

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.attention(x, x, x, attn_mask=mask, need_weights=self.need_weights)[0]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.layer(x, x.flip(1), tgt_is_causal=True, tgt_mask=nn.Transformer.generate_square_subsequent_mask(6))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.layer(x)


MODELS = {
    "mlp": Mlp,
    "convolutions": ConvNet,
    "attention": lambda: SelfAttention(need_weights=False),
    "attention with its weights": lambda: SelfAttention(need_weights=True),
    "decoder": Decoder,
    "decoder, eval": lambda: Decoder().eval(),
    "encoder": Encoder,
    "encoder, eval": lambda: Encoder().eval(),
}


def run(model, x, region, backward=True):
    torch.manual_seed(0)
    model.zero_grad()
    x = x.clone().requires_grad_(backward)
    with region:
        y = model(x)
        loss = F.mse_loss(y, torch.zeros_like(y)) * 100
    if not backward:
        return [y]
    loss.backward()
    return [y, loss, x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_equal_those_under_torch_autocast(name, dtype):
    model, x = MODELS[name](), torch.randn(3, 6, WIDTH)
    expected = run(model, x, torch.autocast("cpu", dtype))
    found = run(model, x, Autocast(dtype))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert all(grad.dtype == torch.float32 for grad in found[2:])


@pytest.fixture
def without_fused_inference():
    """On the CPU, torch.autocast lets fused functions for inference pass, which return what ours doesn't."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def test_inference_takes_no_fused_path_that_bypasses_the_mode():
    model, x = Encoder().eval(), torch.randn(3, 6, WIDTH)
    with torch.inference_mode(), Autocast(torch.bfloat16):
        assert model(x).dtype == torch.float32
        assert model.layer.self_attn(x, x, x)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", MODELS)
def test_inference_equals_torch_autocast(name, without_fused_inference):
    model, x = MODELS[name]().eval(), torch.randn(3, 6, WIDTH)
    for no_gradients in (torch.no_grad, torch.inference_mode):
        with no_gradients():
            expected = run(model, x, torch.autocast("cpu", torch.bfloat16), backward=False)
            found = run(model, x, Autocast(torch.bfloat16), backward=False)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_in_the_low_type(kind, dtype):
    layer, x = kind(WIDTH, WIDTH, num_layers=2, bidirectional=True), torch.randn(6, 3, WIDTH)
    low = kind(WIDTH, WIDTH, num_layers=2, bidirectional=True).to(dtype)
    low.load_state_dict(layer.state_dict())
    with Autocast(dtype):
        y, state = layer(x)
    expected, _ = low(x.to(dtype))
    assert y.dtype == dtype and all(s.dtype == dtype for s in (state if isinstance(state, tuple) else [state]))
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    y.float().square().mean().backward()
    expected.float().square().mean().backward()
    for ours, theirs in zip(layer.parameters(), low.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32
        torch.testing.assert_close(ours.grad, theirs.grad.float(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_gradients_of_recurrent_layers_are_close_to_those_under_torch_autocast(kind):
    """Close, for torch keeps the state in fp32. Without oneDNN, whose lstm not every CPU can run in bf16."""
    layer, x = kind(WIDTH, WIDTH), torch.randn(6, 3, WIDTH)
    grads = []
    for region in (Autocast(torch.bfloat16), torch.autocast("cpu", torch.bfloat16)):
        layer.zero_grad()
        with torch.backends.mkldnn.flags(enabled=False), region:
            layer(x)[0].float().square().mean().backward()
        grads.append([parameter.grad.clone() for parameter in layer.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        assert relative_error(ours, theirs) < 3e-2


def test_a_recurrent_layer_takes_low_precision_and_packed_input():
    layer, x = nn.LSTM(WIDTH, WIDTH), torch.randn(6, 3, WIDTH)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 2]))
    with Autocast(torch.bfloat16):
        assert layer(nn.Linear(WIDTH, WIDTH)(x))[0].dtype == torch.bfloat16
        assert layer(packed)[0].data.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype"):
        layer(x.bfloat16())


def test_a_custom_function_runs_its_forward_in_the_region():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return x @ w

    x = torch.randn(4, 4)
    with Autocast(torch.bfloat16), contextlib.suppress(NotImplementedError):
        assert Product.apply(x, x).dtype == torch.bfloat16


BOTH = pytest.mark.parametrize("use_reentrant", [False, True])


def block():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 8))


def gradients(model, forward, region):
    torch.manual_seed(0)
    model.zero_grad()
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    with region:
        loss = forward(x).float().square().sum()
    loss.backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def products_in_backward(model, forward, region):
    """The types of the matrix products between two marks: those that backward recomputes and its own."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                seen.append(args[-1].dtype)
            return func(*args, **(kwargs or {}))

    x = torch.randn(4, 8, requires_grad=True)
    with region:
        loss = forward(x).float().sum()
    with Watch():
        loss.backward()
    return set(seen)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_equal_those_without_checkpoint_and_those_under_torch_autocast(use_reentrant, dtype):
    model = block()
    again = lambda x: checkpoint(model, x, use_reentrant=use_reentrant)  # noqa: E731
    found = gradients(model, again, Autocast(dtype))
    torch.testing.assert_close(found, gradients(model, again, torch.autocast("cpu", dtype)), rtol=0, atol=0)
    torch.testing.assert_close(found, gradients(model, model, Autocast(dtype)), rtol=0, atol=0)


@BOTH
def test_the_recomputation_multiplies_in_the_low_type(use_reentrant):
    model = block()
    types = products_in_backward(
        model, lambda x: checkpoint(model, x, use_reentrant=use_reentrant), Autocast(torch.bfloat16)
    )
    assert types == {torch.bfloat16}


@BOTH
def test_regions_inside_and_around_the_checkpoint(use_reentrant):
    model = block()

    def inner(x):
        with Autocast(enabled=False):
            x = model(x.float())
        x = x @ x.T
        with Autocast(torch.float16):
            return model(torch.cat([x, x], 1).to(torch.float16))

    def around(x):
        x = checkpoint(inner, x, use_reentrant=use_reentrant)
        with Autocast(enabled=False):
            x = checkpoint(model, x.float(), use_reentrant=use_reentrant)
        return checkpoint(model, x, use_reentrant=use_reentrant)

    def plainly(x):
        x = inner(x)
        with Autocast(enabled=False):
            x = model(x.float())
        return model(x)

    found = gradients(model, around, Autocast(torch.bfloat16))
    expected = gradients(model, plainly, Autocast(torch.bfloat16))
    torch.testing.assert_close(
        found, expected, rtol=1e-5, atol=1e-5
    )  # reentrant: the gradients add up in another order


@BOTH
def test_a_region_inside_a_checkpoint_ends_where_it_ends(use_reentrant):
    model = block()

    def partly(x):
        with Autocast(torch.bfloat16):
            x = model(x)
        return model(x.float())

    found = gradients(model, lambda x: checkpoint(partly, x, use_reentrant=use_reentrant), contextlib.nullcontext())
    torch.testing.assert_close(found, gradients(model, partly, contextlib.nullcontext()), rtol=0, atol=0)


@BOTH
def test_checkpoints_in_a_checkpoint(use_reentrant):
    model = block()

    def nested(x):
        x = model(x)
        x = checkpoint(model, x, use_reentrant=use_reentrant)
        return model(x)

    again = lambda x: checkpoint(nested, x, use_reentrant=use_reentrant)  # noqa: E731
    found = gradients(model, again, Autocast(torch.bfloat16))
    torch.testing.assert_close(found, gradients(model, nested, Autocast(torch.bfloat16)), rtol=0, atol=0)


@BOTH
def test_checkpoint_sequential_and_backward_inside_the_region(use_reentrant):
    model = block()
    x = torch.randn(4, 8, requires_grad=True)
    grads = []
    for segments in (1, 3):
        torch.manual_seed(0)
        with Autocast(torch.bfloat16):
            checkpoint_sequential(model, segments, x, use_reentrant=use_reentrant).float().sum().backward()
        grads.append(x.grad)
        x.grad = None
    torch.testing.assert_close(*grads, rtol=0, atol=0)
