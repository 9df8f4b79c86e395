"""GPUs by name: peaks, bandwidths and memory, from data/gpu_rates.csv, where each has its source."""

import csv
import difflib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("data")
REACHED = 0.9  # of a datasheet's peak, by the best product of a card that nobody published one of
MEASURED = "h200"  # the card whose sustained rates were measured: others' are to their best as its are
LAUNCH_US = 7.3  # the host's time for a launch, Python included: data/results/nvidia-h200/swiglu/ceilings.csv


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU. TFLOP/s are dense; `gb_per_s` is its memory's bandwidth, `link_gb_per_s` that to other GPUs, one way."""

    gpu: str
    names: str = ""
    bf16_tflops: float
    fp8_tflops: float = 0.0  # 0: it has none
    fp32_tflops: float = 0.0  # without tensor cores
    best_bf16_tflops: float = 0.0  # the best measured product
    best_fp8_tflops: float = 0.0
    gb_per_s: float
    processors: float = 0.0
    ghz: float = 0.0
    link_gb_per_s: float = 31.5  # PCIe 4 × 16
    memory_gib: float = 0.0
    # Large products for seconds: the median, what the fastest fifth reach before the clock falls, and that under bf16's
    sustained_bf16_tflops: float = 0.0
    sustained_fp8_tflops: float = 0.0
    sustained_tf32_tflops: float = 0.0
    sustained_fp32_tflops: float = 0.0
    fastest_bf16_tflops: float = 0.0
    fastest_fp8_tflops: float = 0.0
    fastest_tf32_tflops: float = 0.0
    fastest_fp32_tflops: float = 0.0
    sustained_mhz: float = 0.0
    copied_gb_per_s: float = 0.0
    capability: float = 0.0  # NVIDIA's compute capability; 0 of another maker's card, and of one given by its rates
    network_gb_per_s: float = 25.0  # a GPU's share of the network between machines: up to A100, and 50 since H100
    source: str = "given"

    def best(self, precision: str) -> float:
        """The rate of the best product: the best that was published, else nine tenths of the datasheet's; 0: none."""
        if precision == "fp32":
            return self.fp32_tflops or self.bf16_tflops / 16  # as on an A100
        if precision == "tf32":
            return self.best("bf16") / 2 if self.bf16_units else self.best("fp32")
        if precision == "fp8":
            return self.best_fp8_tflops or REACHED * self.fp8_tflops
        return self.best_bf16_tflops or REACHED * self.bf16_tflops

    def sustained(self, precision: str) -> float:
        """The rate, in TFLOP/s, that large products keep up in fp32, tf32, bf16 (or fp16) or fp8.

        Where nobody measured it, it is to the best as on the card where somebody did: in fp32, of the datasheet's peak,
        and by tensor cores, which are held by the card's power, of the best published product in 16 bits.
        """
        precision = "bf16" if precision == "fp16" else precision
        if measured := getattr(self, f"sustained_{precision}_tflops"):
            return measured
        if precision == "tf32" and not self.bf16_units:
            return self.sustained("fp32")
        known, kind = cards()[MEASURED], "fp32" if precision == "fp32" else "bf16"
        return self.best(precision) * known.sustained(kind) / known.best(kind)

    @property
    def copy_gb_per_s(self) -> float:
        """The rate of a copy, bytes read and bytes written."""
        known = cards()[MEASURED]
        return self.copied_gb_per_s or self.gb_per_s * known.copied_gb_per_s / known.gb_per_s

    @property
    def bf16_units(self) -> bool:
        return not 0 < self.capability < 8

    @property
    def special_tops(self) -> float:
        """10¹² exponentials a second: 16 a clock and processor; of a card given by flags, as many as on an A100."""
        return 16 * self.processors * self.ghz / 1e3 or self.bf16_tflops * 0.0078


@functools.cache
def cards() -> dict[str, Card]:
    """All cards of the table by their short names."""
    text = ("gpu", "names", "source")
    with (DATA / "gpu_rates.csv").open(encoding="utf-8") as file:
        rows: list[dict[str, Any]] = [
            {k: v if k in text else float(v) for k, v in row.items() if v} for row in csv.DictReader(file)
        ]
    return {row["gpu"]: Card(**row) for row in rows}


def card(name: str) -> Card:
    """A card by any of its names, as nvidia-smi, torch or people write them."""
    known = {_plain(alias): card for card in cards().values() for alias in (card.gpu, *card.names.split(";"))}
    if found := known.get(_plain(name)):
        return found
    near = difflib.get_close_matches(_plain(name), known, 3, 0.5)
    nearest = list(dict.fromkeys(known[alias].gpu for alias in near)) or list(cards())
    raise ValueError(
        f"gpu is {name!r}, which isn't in the table; nearest: {', '.join(nearest)}; any other by its rates"
    )


def likely(device: str) -> Card | None:
    """The card of a device's full name: that of the longest name in the table whose words it holds, in order."""
    known = {_words(alias): card for card in cards().values() for alias in (card.gpu, *card.names.split(";"))}
    return known.get(max((words for words in known if f" {words} " in f" {_words(device)} "), key=len, default=""))


def _plain(name: str) -> str:
    return _words(name).replace(" ", "")


def _words(name: str) -> str:
    words = "".join(c if c.isalnum() else " " for c in str(name).lower()).split()
    return " ".join(w for w in words if w not in ("nvidia", "tesla", "geforce", "amd", "instinct"))
