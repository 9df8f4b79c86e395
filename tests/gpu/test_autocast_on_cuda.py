"""`Autocast` on a GPU against torch.autocast: gradients, recurrent layers, checkpoints, overhead."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.amp import Autocast
from helpers.lab.timing import NO_DIFFERENCE, compare, relative_error

DTYPES = [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def gradients(model, x, region):
    model.zero_grad()
    x = x.clone().requires_grad_()
    with region:
        y = model(x)
        y = y[0] if isinstance(y, tuple) else y
        loss = F.mse_loss(y, torch.zeros_like(y))
    loss.backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def check_gradients(model, x, dtype, ours=None):
    result = gradients(ours or model, x, Autocast(dtype))
    expected = gradients(model, x, torch.autocast("cuda", dtype))
    for mine, theirs in zip(result, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert relative_error(mine, theirs) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_equal_those_under_torch_autocast(dtype):
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.Softmax(-1)).cuda()
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True).cuda()
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)).cuda()
    x = torch.randn(8, 32, 64, device="cuda")
    check_gradients(mlp, x, dtype)
    check_gradients(layer, x, dtype)
    check_gradients(layer.eval(), x, dtype)
    check_gradients(convolutions, torch.randn(4, 3, 32, 32, device="cuda"), dtype)


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}]
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_equal_those_under_torch_autocast(kind, options):
    layer, x = kind(32, 64, **options).cuda(), torch.randn(12, 4, 32, device="cuda")
    check_gradients(layer, x, torch.float16)


def test_a_recurrent_layer_with_projection_and_no_warning():
    layer, x = nn.LSTM(32, 64, proj_size=16).cuda(), torch.randn(12, 4, 32, device="cuda")
    pointers = [parameter.data_ptr() for parameter in layer.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Autocast(torch.float16):
            layer(x)
            assert layer(x)[0].dtype == torch.float16
    assert pointers == [parameter.data_ptr() for parameter in layer.parameters()]
    check_gradients(layer, x, torch.float16)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_recomputes_in_backwards_own_thread(use_reentrant):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64)).cuda()

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return checkpoint(self.model, x, use_reentrant=use_reentrant)

    x = torch.randn(8, 64, device="cuda")
    check_gradients(model, x, torch.bfloat16, Checkpointed())


@pytest.mark.alone
def test_a_training_step_costs_what_it_costs_under_torch_autocast():
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    x = torch.randn(16, 1024, 1024, device="cuda")

    def step(region):
        def run():
            with region:
                loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    steps = {"torch": step(torch.autocast("cuda", torch.bfloat16)), "ours": step(Autocast(torch.bfloat16))}
    ratio, _, _ = compare(steps, rounds=20, check=False).ratio("ours", "torch")
    assert ratio <= 1 + NO_DIFFERENCE


def test_nothing_waits_for_the_gpu(no_waiting):
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).cuda()
    x = torch.randn(8, 64, device="cuda")
    with Autocast():
        model(x)
    no_waiting()
    with Autocast():
        loss = model(x).float().square().mean()
    loss.backward()
