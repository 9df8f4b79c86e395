"""The CPU's name and allocator, and the best of its libraries for matrix products."""

import resource
import sys

import pytest
import torch

from helpers.lab import ceilings, cpu, in_fresh_process, keep_pages
from helpers.lab.timing import Timing


def new_pages(kept: bool) -> tuple[str, int]:
    """Page faults of filling 64 MiB anew, once the allocator has settled; why they can't be avoided."""
    why = keep_pages() if kept else ""
    faults = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(2**24).fill_(1.0)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return why, min(faults[4:])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
@pytest.mark.long
def test_a_process_that_keeps_its_pages_gets_no_new_ones():
    assert in_fresh_process(new_pages, False)[1] > 10_000  # this one may have run a notebook, which keeps them
    why, faults = in_fresh_process(new_pages, True)
    assert faults < 100 or why


def test_another_allocator_is_left_alone(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libtcmalloc.so.4")
    assert "libtcmalloc" in keep_pages()
    monkeypatch.setattr("sys.platform", "darwin")
    assert keep_pages() == "needs glibc"


@pytest.mark.parametrize(
    ("facts", "model"),
    [
        (("AuthenticAMD", 25, "AMD EPYC", "avx2"), "AMD EPYC (Zen 3)"),
        (("AuthenticAMD", 25, "AMD EPYC", "avx2 avx512f avx512_bf16"), "AMD EPYC (Zen 4)"),
        (("AuthenticAMD", 25, "AMD EPYC 7763 64-Core Processor", "avx2"), "AMD EPYC 7763 64-Core Processor"),
        (("GenuineIntel", 6, "Intel(R) Xeon(R) Processor @ 2.50GHz", "avx512f"), "Processor @ 2.50GHz (Skylake)"),
        (("Made-up", 1, "CPU", "avx2"), "CPU"),
    ],
)
def test_a_bare_name_gets_its_generation(facts, model, monkeypatch):
    names = ("vendor_id", "cpu family", "model name", "flags")
    monkeypatch.setattr(cpu, "_facts", lambda: dict(zip(names, map(str, facts), strict=True)))
    description = cpu.describe()
    assert model in description
    assert " cores, " in description and " GiB, " in description and "avx" in description


def test_the_best_rate_is_named_and_the_precision_restored(monkeypatch):
    rates = {"highest": 0.2, "medium": 0.4}
    timing = Timing(1.0, 0.8, 1.0, 1)
    monkeypatch.setattr(ceilings, "matmul", lambda *_: (timing, rates[torch.get_float32_matmul_precision()]))
    measured = ceilings.product_rate.__wrapped__
    monkeypatch.setattr(ceilings, "medium_is_fp32", lambda: True)
    assert (measured("float32").library, measured("float32").tflops) == ('oneDNN ("medium")', 0.4)
    assert measured("float32").p20_tflops == pytest.approx(0.5)
    monkeypatch.setattr(ceilings, "medium_is_fp32", lambda: False)
    assert measured("float32").tflops == 0.2
    assert torch.get_float32_matmul_precision() == "highest"


def test_products_in_bf16_are_no_fp32_products(monkeypatch):
    exact = torch.Tensor.__matmul__

    def rounded(left, right):
        if torch.get_float32_matmul_precision() == "medium" and left.dtype == torch.float32:
            return exact(left.bfloat16(), right.bfloat16()).float()
        return exact(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert not ceilings.medium_is_fp32.__wrapped__()
