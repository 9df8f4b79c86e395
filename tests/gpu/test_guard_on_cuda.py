"""What the guard counts of a GPU: kernels, and waits of the host, of which torch warns after the operator."""

import pytest
import torch

from helpers.guard.blocks import Guard
from helpers.guard.record import MoreWork


def test_a_read_of_the_loss_is_a_wait_at_its_line(tmp_path):
    net = torch.nn.Linear(64, 8, device="cuda")
    optimizer = torch.optim.SGD(net.parameters(), fused=True)
    x, reads = torch.ones(32, 64, device="cuda"), 0

    def step() -> None:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(reads):
            loss.item()

    guard = Guard(tmp_path / "speed_guard.json")
    with guard("step") as counts:
        step()
    assert counts.launches > 0
    reads = 2
    with pytest.raises(MoreWork, match=r"host waits 0 → 2 a step: .*loss\.item\(\)"), guard("step"):
        step()
