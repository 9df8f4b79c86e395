"""Records of a GPU that doesn't exist, so that what is said of measurements can be tested where there is no GPU."""

from pathlib import Path

from helpers.lab import records
from helpers.lab.experiment import OUT_OF_MEMORY
from helpers.swiglu import costs, experiments, peers

GIB = 2**30
ORIGIN = {
    "status": "ok",
    "preset": "full",
    "gpu": "NVIDIA Test",
    "driver": "1.2.3",
    "torch": "2.13.0+cu130",
    "cuda": "13.0",
    "date": "2026-01-02",
    "commit": "0123456789",
    "method": 1,
}
SPREAD = {"median_ms": 3.21, "p20_ms": 3.2, "p80_ms": 3.25, "n": 20}


def write(results: Path, gpu: str = "nvidia-test", name: str = "NVIDIA Test") -> None:
    """A full set of chapter 4's records: times made up, memory as derived and half a percent more."""
    for table, measure in TABLES.items():
        e = getattr(experiments, table)
        rows = [
            config | ORIGIN | {"gpu": name} | row
            for config in e.configurations("full")
            for row in measure(config)
        ]  # fmt: skip
        records.replace(records.path(gpu, "swiglu", table, results), rows)


def _sweep(config):
    tokens, size = config["batch"] * config["seq_len"], costs.ITEMSIZE[config["dtype"]]
    hidden, intermediate, layers = config["hidden_dim"], config["intermediate_size"], config["num_layers"]
    level = config["checkpoint_level"]
    before = 2 * 3 * hidden * intermediate * layers * size + 3 * tokens * hidden * size
    peak = (before + costs.peak_bytes(level, tokens, hidden, intermediate, layers, size)) / GIB * 1.005
    if peak > 139:
        return [{"status": OUT_OF_MEMORY}]
    work = tokens * hidden * intermediate * layers * 2 / 700e12
    backward = work * (8.2 if level == 1 else 6)
    kept = layers * costs.kept_bytes(level, tokens, hidden, intermediate, size) / GIB
    times = {"forward_s": 3 * work, "forward_p20_s": 2.9 * work, "forward_p80_s": 3.1 * work}
    times |= {"backward_s": backward, "backward_p20_s": backward * 0.99, "backward_p80_s": backward * 1.01}
    return [times | {"n": 20, "peak_gib": peak, "before_gib": before / GIB, "saved_gib": kept}]


def _peers(config):
    rows = []
    for way in peers.WAYS:
        derived = costs.derived(way, config["hidden_dim"], config["intermediate_size"], 2)
        share = derived.kept_ratio if derived else 0.5
        ratio = (derived.products if derived else 9.5) / 9
        memory = {"saved_mib": 500 * share, "saved_ratio": share, "peak_added_mib": 700 * share, "error": 1e-3}
        ratios = {"ratio_to_plain": ratio * 0.93}
        for name in ("ratio_to_compiled", "ratio_to_liger"):
            ratios |= {name: ratio, f"{name}_p20": ratio * 0.99, f"{name}_p80": ratio * 1.01}
        rows.append({"way": way, "version": "1.0"} | memory | SPREAD | ratios)
    return rows


def _accuracy(config):
    error = 7e-3 if config["checkpoint_level"] == 3 else 2e-3
    names = ("output", "grad_x", "grad_W", "grad_V", "grad_U")
    return [{f"{plain}{name}_error": error for plain in ("", "plain_") for name in names}]


def _training(config):
    return [{"first_loss": 0.5, "final_loss": 0.01 + 0.001 * config["seed"]}]


def _timing(config):
    return [
        {
            "unsynchronised_ms": 0.02,
            "synchronised_ms": 2.1,
            "events_ms": 2.0,
            "events_p20_ms": 1.9,
            "events_p80_ms": 2.1,
            "n": 20,
        }
    ]


def _ceilings(config):
    return [SPREAD | ({"tflops": 780.0} if config["ceiling"] == "matmul" else {"gb_per_s": 4300.0})]


TABLES = {
    "sweep": _sweep,
    "peers": _peers,
    "accuracy": _accuracy,
    "training": _training,
    "timing": _timing,
    "ceilings": _ceilings,
}
