"""The project's own pieces, guarded: `speed_guard.json` beside this file holds what a step of each does."""

import numpy as np
import torch
from torch import nn

from helpers.amp import Autocast, DynamicGradScaler
from helpers.batching import SequencedDataset
from helpers.lab import device
from helpers.swiglu import MemoryOptimizedSwigluMLP


def test_a_scaled_step_has_the_host_wait_for_nothing(speed_guard):
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to(device())
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler, x = DynamicGradScaler("cpu", init_scale=8.0), torch.randn(16, 32, device=device())
    with speed_guard("scaler", steps=3) as counted:
        optimizer.zero_grad()
        with Autocast(dtype=torch.float16):
            loss = net(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert counted.a_step()["host waits"] == 0


def test_level_2_of_swiglu_stores_x_and_two_products(speed_guard):
    layer = MemoryOptimizedSwigluMLP(32, 64, checkpoint_level=2, device=device())
    x = torch.randn(2, 16, 32, device=device(), requires_grad=True)
    with speed_guard("swiglu level 2", steps=3) as counted:
        layer(x).sum().backward()
        layer.zero_grad()
    assert counted.a_step()["bytes stored"] == 2 * (2 * 16 * 64) * 4  # x is there before the step


def test_packed_batches_have_almost_no_padding(speed_guard):
    lengths = np.random.default_rng(0).integers(5, 60, 400)
    samples = [np.full(length, 1 + length) for length in lengths]
    batches = iter(SequencedDataset(samples, batch_size=None, max_length=256, strategy="best-fit", fixed=True))
    with speed_guard("packed batch", steps=3) as counted:
        counted.mask(next(batches).tokens > 0)
    assert counted.a_step()["padding"] < 0.02
