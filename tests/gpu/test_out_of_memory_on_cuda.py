"""What fills a GPU when a script ends out of memory."""

import pytest
import torch

from helpers.cli import main
from helpers.script.out_of_memory import GRADIENTS, HELD, STATE, WEIGHTS, filled

SCRIPT = """
import torch
model = torch.nn.Linear(512, 512, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(100):
    model(torch.randn(64, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    if step == 20:
        torch.empty(2**43, device="cuda")
"""


def test_each_kind_of_tensor_is_counted_once():
    model = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    kept = [torch.randn(8, 1024, device="cuda") for _ in range(3)]
    model(kept[0]).square().mean().backward()
    optimizer.step()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**43, device="cuda")
    found = filled(caught.value)
    size = 4 * (1024 * 1024 + 1024)
    assert found.parts[WEIGHTS] >= size and found.parts[GRADIENTS] >= size and found.parts[STATE] >= 2 * size
    assert found.parts[HELD] >= 3 * 4 * 8 * 1024 and found.asked == 4 * 2**43
    assert "torch.empty(2**43" in found.where


def test_profile_tells_what_filled_the_device(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert main(["profile", "train.py"]) == 1
    told, failed = capfd.readouterr()
    assert "out of memory at train.py:9  torch.empty(2**43" in told and "weights" in told
    assert "OutOfMemoryError" in failed
