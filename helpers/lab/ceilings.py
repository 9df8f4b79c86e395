"""This machine's upper limits, measured: the rate of a large matrix product and the bandwidth of a large copy.

The data are random: a GPU multiplies zeros faster. And what a GPU's clock and power are while it works (`UnderLoad`).

One rate of products is the one that all is compared with, `product_rate`: the median after the card has had a second to
get warm. A GPU lowers its clock within milliseconds when it reaches its power limit, so the first products of an idle
one are up to a sixth faster than any training can be: that rate is the 20th percentile of a short measurement.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from .machine import device, device_class
from .precision import fp32_products
from .timing import Timing, bench

LARGE = {"cpu": 2048, "gpu": 4096, "big-gpu": 8192}  # a product's size
SETTLING_S = 1.0


def matmul(size: int, dtype: torch.dtype, **repetitions: Any) -> tuple[Timing, float]:
    """Time of a square product and its rate in TFLOP/s, counting 2·size³ operations; `repetitions` are `bench`'s.

    Products of float8 numbers are summed up as torchao's are in training, and come out in bf16.
    """
    left, right = (torch.randn(size, size, device=device()).to(dtype) for _ in range(2))
    if dtype.itemsize == 1:
        one = torch.ones((), device=device())
        product = functools.partial(torch._scaled_mm, left, right.t(), one, one, out_dtype=torch.bfloat16)
        timing = bench(functools.partial(product, use_fast_accum=True), **repetitions)
    else:
        out = torch.empty_like(left)
        timing = bench(lambda: torch.mm(left, right, out=out), **repetitions)
    return timing, 2 * size**3 / timing.median_ms / 1e9


@dataclass(frozen=True)
class ProductRate:
    """A rate of large matrix products in one type, in TFLOP/s: the median, and the card's clock and power meanwhile
    (None on a CPU)."""

    library: str
    tflops: float
    timing: Timing
    clock_mhz: int | None = None
    power_w: float | None = None

    @property
    def p20_tflops(self) -> float:
        """What the fastest fifth of the products reach, before the card lowers its clock."""
        return self.tflops * self.timing.median_ms / self.timing.p20_ms

    def row(self) -> dict[str, Any]:
        """The columns of a record."""
        names = ("library", "tflops", "p20_tflops", "clock_mhz", "power_w")
        return {f"product_{name}": getattr(self, name) for name in names}


@functools.cache
def product_rate(product_type: str, size: int | None = None) -> ProductRate:
    """The rate that large products keep up, by the fastest of torch's libraries; measured once in a process.

    The type is torch's name of one, or "tf32". It takes two seconds on a GPU, whose clock settles first, and on a CPU
    as long as twenty products by each library.
    """
    dtype = torch.float32 if product_type == "tf32" else getattr(torch, product_type)
    size, on_gpu = size or LARGE[device_class()], device().type == "cuda"
    with fp32_products("high" if product_type == "tf32" else "highest"):
        settled = time.monotonic() + SETTLING_S
        while on_gpu and time.monotonic() < settled:
            matmul(size, dtype)
        with UnderLoad() as card:
            rates = {}
            for name, library in _libraries(dtype).items():
                with library:
                    timing, tflops = matmul(size, dtype, **({"seconds": SETTLING_S} if on_gpu else {}))
                rates[name] = (tflops, timing)
    fastest, (tflops, timing) = max(rates.items(), key=lambda rate: rate[1][0])
    return ProductRate(fastest, tflops, timing, card.clock_mhz, card.power_w)


def rate_beside() -> float:
    """TFLOP/s of an fp32 product, within a tenth of a second: what the machine gives at this moment."""
    return matmul(1024 if device().type == "cpu" else 4096, torch.float32, repeat=5, warmup=1, seconds=0.05)[1]


def large_copy(on_cpu: int) -> int:
    """MiB of a copy whose bandwidth is that of memory, not of a cache: on a CPU as given, on a GPU less than it has."""
    return {"cpu": on_cpu, "gpu": 1024, "big-gpu": 4096}[device_class()]


def copy(mib: int) -> tuple[Timing, float]:
    """Time of a copy of `mib` MiB on the device, and its GB/s, counting bytes read and bytes written."""
    elements = mib * 2**20 // 4
    source, target = torch.randn(elements, device=device()), torch.empty(elements, device=device())
    timing = bench(lambda: target.copy_(source))
    return timing, 2 * 4 * elements / timing.median_ms / 1e6


def to_device(mib: int, pinned: bool) -> tuple[Timing, float]:
    """Time of a copy of `mib` MiB from the host's memory, pinned or pageable, and its GB/s."""
    source = torch.ones(mib * 2**18).pin_memory() if pinned else torch.ones(mib * 2**18)
    target = torch.empty_like(source, device=device())
    timing = bench(lambda: target.copy_(source, non_blocking=pinned))
    return timing, source.nbytes / timing.median_ms / 1e6


def launch(number: int) -> Timing:
    """Time of a kernel of one number, when so many are queued one after the other: Python and the driver, mostly."""
    x = torch.zeros((), device=device())

    def queue() -> None:
        for _ in range(number):
            x.add_(1)

    timing = bench(queue)
    one = (timing.median_ms / number, timing.p20_ms / number, timing.p80_ms / number)
    return Timing(*one, timing.n, timing.device_share)


def _libraries(dtype: torch.dtype) -> Mapping[str, contextlib.AbstractContextManager]:
    """The libraries that torch can multiply with on this device, by name, each as a context in which it does.

    fp32 products on a CPU are MKL's (or another BLAS's). `torch.set_float32_matmul_precision("medium")` hands them to
    oneDNN where torch has a kernel of it for this CPU. One that rounds the inputs to bf16 doesn't count.
    """
    if device().type == "cuda":
        return {"hipBLAS" if torch.version.hip else "cuBLAS": contextlib.nullcontext()}
    if dtype != torch.float32:
        return {"oneDNN": contextlib.nullcontext()}
    libraries = {"MKL" if torch.backends.mkl.is_available() else "BLAS": fp32_products("highest")}
    return libraries | ({'oneDNN ("medium")': fp32_products("medium")} if medium_is_fp32() else {})


@functools.cache
def medium_is_fp32() -> bool:
    """Whether "medium" chooses another kernel on this CPU, with the error of fp32."""
    left, right = torch.randn(2, 512, 512)
    exact = left.double() @ right.double()
    with fp32_products("highest"):
        highest = left @ right
    with fp32_products("medium"):
        medium = left @ right
    same_kernel = torch.equal(highest, medium)
    return not same_kernel and bool((medium - exact).norm() < 4 * (highest - exact).norm())


class UnderLoad:
    """A GPU's clock in MHz and power in W when it took most power: `with UnderLoad() as card: …; card.clock_mhz`.

    Asked five times a second, by torch, which needs the package nvidia-ml-py for it; None without that and on a CPU.
    """

    clock_mhz: int | None = None
    power_w: float | None = None

    def __enter__(self) -> Self:
        self._ended = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        if device().type == "cuda":
            self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._watching.is_alive():
            self._watching.join()

    def _watch(self) -> None:
        with contextlib.suppress(Exception):  # no package, no driver, or a card that doesn't tell
            while True:
                power_w = torch.cuda.power_draw() / 1e3
                if power_w > (self.power_w or 0):
                    self.power_w, self.clock_mhz = power_w, torch.cuda.clock_rate()
                if self._ended.wait(0.2):
                    return
