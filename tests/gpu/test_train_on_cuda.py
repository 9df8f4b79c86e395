"""Training on a GPU: fp32 that is fp32 inside, and steps on pictures that the host doesn't wait in."""

import pytest
import torch

from helpers.lab.timing import relative_error
from helpers.train import Setup, build_task


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs TF32")
def test_convolutions_and_products_keep_fp32_in_an_fp32_run():
    torch.manual_seed(0)
    x, weight = torch.randn(8, 64, 32, 32, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")
    a, b = torch.randn(2, 512, 512, device="cuda")
    ways = (lambda wide: torch.nn.functional.conv2d(x.to(wide), weight.to(wide)), lambda wide: a.to(wide) @ b.to(wide))
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        for way in ways:
            exact = way(torch.float64)
            rounded = relative_error(way(torch.float32), exact)
            with Setup(precision="fp32").in_precision().kernels():
                assert relative_error(way(torch.float32), exact) < 1e-5 < rounded
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_taking_a_batch_of_pictures_waits_for_nothing(no_waiting):
    task = build_task(Setup(task="segmentation"), torch.device("cuda"))
    batches = [task.batches(0), task.validation()]
    no_waiting()
    assert all(len(list(each)) > 1 for each in batches)
