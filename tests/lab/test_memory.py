import re
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import profile

from helpers.lab import cpu, device, peak_memory, saved_bytes
from helpers.lab import memory as lab_memory
from helpers.lab.memory import AVAILABLE, GIB, PEAK, RESIDENT, PeakAbove, is_out_of_memory, system_bytes

KIB = 1024


def test_the_peak_counts_what_was_freed_again():
    def work():
        first = torch.empty(300 * KIB, dtype=torch.uint8, device=device())
        del first
        return torch.empty(100 * KIB, dtype=torch.uint8, device=device())

    memory = peak_memory(work)
    assert memory.added_bytes == 300 * KIB
    assert memory.kept_bytes == 100 * KIB


def test_a_step_needs_as_much_whatever_was_measured_before():
    weight = torch.randn(300, KIB, requires_grad=True, device=device())

    def step():
        weight.grad = None
        weight.square().sum().backward()

    peaks = [peak_memory(step).peak_bytes for _ in range(3)]
    assert len(set(peaks)) == 1
    assert peaks[0] >= weight.nbytes


@pytest.mark.skipif(device().type == "cuda", reason="the CPU's is measured with the profiler")
def test_memory_is_not_measured_inside_a_profile():
    with profile() as profiler:
        torch.ones(3)
        with pytest.raises(RuntimeError, match="one is running: call it outside"):
            peak_memory(lambda: torch.ones(3))
        torch.ones(5)
    assert sum(event.name == "aten::ones" for event in profiler.events()) == 2


def test_saved_bytes_are_what_backward_needs():
    x = torch.randn(100, requires_grad=True)
    assert saved_bytes(lambda: x + 1) == 0
    assert saved_bytes(lambda: x.exp()) == 400
    assert saved_bytes(lambda: x.exp().exp()) == 800


def test_a_storage_counts_once_and_whole():
    x = torch.randn(100, requires_grad=True)
    assert saved_bytes(lambda: x * x) == 400
    base = torch.randn(100)
    assert saved_bytes(lambda: x[:10] * base[:10]) == 400


def test_tensors_that_exist_anyway_do_not_count():
    layer = torch.nn.Linear(10, 20, bias=False)
    x = torch.randn(5, 10, requires_grad=True)
    assert saved_bytes(lambda: layer(x)) == (50 + 200) * 4
    assert saved_bytes(lambda: layer(x), without=layer.parameters()) == 50 * 4


class FakeGPU:
    """The caching allocator's totals, of blocks that are taken and freed by name."""

    def __init__(self):
        self.blocks, self.peak = {}, 0

    def take(self, name: str, size: int) -> None:
        self.blocks[name] = size
        self.peak = max(self.peak, self.allocated())

    def allocated(self) -> int:
        return sum(self.blocks.values())

    def reset(self) -> None:
        self.peak = self.allocated()


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGPU()
    monkeypatch.setattr(lab_memory, "device", lambda: torch.device("cuda"))
    stands_for = {
        "synchronize": lambda: None,
        "memory_allocated": fake.allocated,
        "max_memory_allocated": lambda: fake.peak,
        "reset_peak_memory_stats": fake.reset,
    }
    for name, function in stands_for.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return fake


def test_the_peak_of_a_second_training_has_nothing_that_the_first_left(gpu):
    def train() -> float:
        with PeakAbove() as peak:
            gpu.take("weights", 2 * GIB)
            gpu.take("activations", 3 * GIB)
            del gpu.blocks["activations"]
        gpu.take("left over", gpu.blocks.pop("weights"))
        return peak.gib

    assert [train(), train()] == [5, 5]


def test_garbage_of_an_earlier_training_is_freed_before_its_base_is_taken(gpu):
    class Trainer:
        def __init__(self):
            self.step = self.learn  # refers to itself: only a collection frees it
            gpu.take("weights", 2 * GIB)

        def learn(self): ...

        def __del__(self):
            del gpu.blocks["weights"]

    Trainer()
    with PeakAbove() as peak:
        gpu.take("activations", 3 * GIB)
    assert peak.gib == 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_that_linux_tells_is_in_bytes_and_the_machines_in_gib():
    kept = torch.ones(2**22)  # 16 MiB
    installed = int(re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())[1]) / 2**20
    assert cpu.memory_gib() == pytest.approx(installed, rel=0.01)
    assert kept.nbytes < system_bytes(RESIDENT) <= system_bytes(PEAK) < cpu.memory_gib() * GIB
    assert 2**20 < system_bytes(AVAILABLE) < cpu.memory_gib() * GIB


def test_other_errors_are_not_taken_for_out_of_memory():
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))
