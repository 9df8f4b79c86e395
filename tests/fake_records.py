"""Records of a GPU that doesn't exist, so that what is said of measurements can be tested where there is no GPU."""

from pathlib import Path

from helpers.experiments import batching, compilers, rush, summary
from helpers.experiments import swiglu as experiments
from helpers.lab import records
from helpers.swiglu import costs, peers

GIB = 2**30
ORIGIN = {
    "status": "ok",
    "preset": "big-gpu",
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
    """A full set of records: times made up, memory as derived and half a percent more."""
    for e, measure in TABLES:
        origin = ORIGIN | {"gpu": name, "method": e.version}
        rows = [config | origin | row for config in e.configurations("big-gpu") for row in measure(config)]
        records.replace(records.path(gpu, e.chapter, e.table, results), rows)


def _peers(config):
    rows = []
    for variant in peers.VARIANTS:
        derived = costs.derived(variant, config["hidden_dim"], config["intermediate_size"], 2)
        share = derived.saved_ratio if derived else 0.5
        ratio = (derived.products if derived else 9.5) / 9
        memory = {"saved_mib": 500 * share, "saved_ratio": share, "peak_added_mib": 700 * share, "error": 1e-3}
        ratios = {"ratio_to_plain": ratio * 0.93}
        for name in ("ratio_to_compiled", "ratio_to_liger"):
            ratios |= {name: ratio, f"{name}_p20": ratio * 0.99, f"{name}_p80": ratio * 1.01}
        rows.append({"variant": variant, "version": "1.0"} | memory | SPREAD | ratios)
    return rows


def _padding(config):
    variants = {"BRAIN": (0.87, 1.0), "BIG BRAIN": (0.7, 1.0)} | {
        f"k = {k}": (k / 1000, k / 640) for k in batching.SPREADS
    }
    return [
        {"variant": variant, "padding_share": share, "candidate_share": choice, "fill": 0.99, "batches": 1000}
        for variant, (share, choice) in variants.items()
    ]


def _sampler_scaling(config):
    slow = config["variant"] == batching.TORCHTEXT
    spread = {"batch_us": 8.0, "batch_p20_us": 7.9, "batch_p80_us": 8.2, "n": 20}
    return [{"init_s": config["samples"] * (2e-6 if slow else 8e-8), "first_batch_ms": 1.0} | spread]


def _packing(config):
    fill = 0.96 if config["strategy"] == "greedy" else 0.999
    return [{"sequences": 1000, "fill": fill, "tokens_lost": 0, "pack_s": 0.1, "n": 5}]


def _batch_time(config):
    shares = ("min_ms", "p5_ms", "p25_ms", "median_ms", "p75_ms", "p95_ms", "max_ms")
    times = {name: 1.0 + place for place, name in enumerate(shares)} | {"mean_ms": 4.0, "batches": 100}
    rates = {"BRAIN": 1e5, "BIG BRAIN": 2e5, "packed": 9e5}
    rows = [
        {"variant": variant, "real_tokens_per_s": rate, "ratio_to_brain": rate / 1e5}
        for variant, rate in {**dict.fromkeys(batching.FEEDS, 8e5), **rates}.items()
    ]
    same = {"padding_share": 0.5, "epoch_s": 1.1, "dtype": "bfloat16", "source": "synthetic text, seed 0"}
    return [times | same | row for row in rows]


def _batching_training(config):
    scores = {"validation_loss": 5.0, "validation_accuracy": 0.2, "guess_accuracy": 0.1, "guess_loss": 6.0}
    return [
        scores
        | {"source": "synthetic text, seed 0", "peak_gib": 12.0, "train_s": 30.0, "real_tokens": 10**6, "steps": 9}
    ]


def _attention(config):
    variants = ("dense", "flex", "varlen", "SDPA per document", "nested tensors", "causal, leaking")
    same = {"build_ms": 0.1, "ratio": 0.5, "peak_gib": 1.0, "dtype": "bfloat16"}
    return [{"variant": variant} | same | SPREAD for variant in variants]


def _throughput(config):
    variants = {"equally long, no padding": 1.0, "BRAIN": 0.1, "BIG BRAIN": 0.3, "k = 10": 0.9, "packed, varlen": 0.98}
    return [
        {"variant": variant, "real_tokens_per_s": 1e6 * ratio, "ratio_to_no_padding": ratio, "dtype": "bfloat16"}
        | SPREAD
        for variant, ratio in variants.items()
    ]


def _collator(config):
    variants = {"flattening collator": 1.0, "packs of one length": 1.1, "packs of one length, compiled": 1.5}
    return [
        {"variant": variant, "real_tokens_per_s": 1e6 * ratio, "ratio_to_collator": ratio, "dtype": "bfloat16"} | SPREAD
        for variant, ratio in variants.items()
    ]


def _rung(config):
    speed = 1 + list(rush.LADDER).index(config["step"]) if "step" in config else 10
    row = {"tokens_per_s": 5000.0 * speed, "step_ms": 30.0, "p20_ms": 29.0, "p80_ms": 31.0, "n": 20, "peak_gib": 20.0}
    shares = {"mfu": 0.03 * speed, "matmul_share": 0.04 * speed, "product_tflops": 780.0}
    return [row | shares | {"compile_s": 3.0, "loss": 11.8, "text": "synthetic text, seed 1"}]


def _rush_peers(config):
    return [_rung({})[0] | {"tokens_per_s": 30000.0, "ours_tokens_per_s": 60000.0, "ratio": 2.0, "ours_loss": 11.8}]


def _loading(config):
    return [{"step_ms": 30.0, "p20_ms": 29.0, "p80_ms": 31.0, "n": 30, "wait_ms": 0.2, "copy_ms": 0.1, "epoch_s": 1.2}]


def _norms(config):
    return [
        {"variant": variant, "ratio_to_torch": 1.0, "share_of_copy": 0.7, "peak_gib": 0.1} | SPREAD
        for variant in rush.fused_norms.VARIANTS
    ]


def _adam(config):
    ours = {"ratio_to_fused": 1.0, "share_of_copy": 0.95} | SPREAD
    return [{"variant": variant} | ours for variant in rush.optimizers.VARIANTS]


def _lecture(config):
    return [{"variant": name, "ratio_to_fp32": 1.0, "peak_gib": 2.0} | SPREAD for name in rush.LECTURE]


def _distributed(config):
    strategies = ("single",) if config["ranks"] == 1 else rush.STRATEGIES
    held = {"parameter_bytes": 100, "gradient_bytes": 100, "optimizer_bytes": 200, "step_ms": 10.0}
    return [held | {"strategy": strategy, "last_loss": 5.5} for strategy in strategies]


def _memory_plan(config):
    gib = {"parameter_gib": 1.0, "gradient_gib": 1.0, "optimizer_gib": 2.0, "peak_gib": 9.0, "derived_gib": 9.09}
    return [gib | {"how": "measured", "simulated": True, "derived_ratio": 1.01}]


def _scaling(config):
    times = {"sent_gib": 30.0, "compute_ms": 400.0, "communication_ms": 100.0, "exposed_ms": 10.0, "step_ms": 410.0}
    return [
        times | {"strategy": strategy, "ranks": ranks, "predicted": True, "efficiency": 0.97}
        for strategy in ("ddp", "zero3")
        for ranks in (8, 64, 512)
    ]


def _memory_alone(config):
    return [{"counted_gib": 20.0, "derived_gib": 20.1, "measured_gib": 20.2, "ratio": 0.99}]


def _stages(config):
    stages = len(summary.chosen(config["way"], config["stage"], summary.ON_GPU))
    times = {"train_s": 300 * 0.7**stages, "epoch_s": 200 * 0.7**stages, "step_ms": 50.0}
    quality = {
        "constant_accuracy": 0.1,
        "validation_loss": 5 + 0.01 * config["seed"],
        "validation_accuracy": 0.2,
        "train_loss": 5.1,
    }
    about = {"real_tokens": 700_000, "skipped_steps": 0, "steps": 128, "source": "synthetic text, seed 0"}
    return [times | quality | about | {"real_tokens_per_s": 1e5, "peak_gib": 40.0 - stages}]


SPEEDS = {
    "files": 1000.0,
    "webdataset": 4000.0,
    "webdataset by index": 5000.0,
    "tfrecord": 3000.0,
    "mapped": 9000.0,
    "ffcv": 8000.0,
}


def _semantics(config):
    wrong = config["case"] == "printing"
    ways = {"torch.jit.trace": "silently wrong" if wrong else "right", "torch.export": "refuses"}
    told = {"when": "", "message": "no", "line": "x + 1", "graphs": 1, "breaks": 0, "recompiles": 0, "warnings": 0}
    return [{"variant": way, "outcome": outcome} | told for way, outcome in ways.items()]


def _deprecations(config):
    return [
        {"call": "torch.jit.trace", "deprecated": "yes", "message": "deprecated", "successor": "torch.export.export"}
    ]


def _fusion(config):
    moved = {"eager": (5, 4e8, 1.0), "torch.compile": (1, 1e8, 0.3)}
    return [
        {"kind": "vertical", "variant": way, "kernels": count, "bytes_moved": moved, "bytes_least": 1e8}
        | {"share_of_least": 1e8 / moved, "ratio": ratio, "ratio_p20": ratio, "ratio_p80": ratio}
        | SPREAD
        for way, (count, moved, ratio) in moved.items()
    ]


def _against_eager(speedup):
    ratios = {"speedup": speedup, "speedup_p20": speedup * 0.9, "speedup_p80": speedup * 1.1, "baseline_ms": 5.0}
    return SPREAD | ratios | {"samples_per_s": 200.0, "build_s": 9.0}


def _latency(config):
    speedup = {"eager": 1.0, "ONNX Runtime": 1.5}.get(config["backend"], 1.2)
    return [_against_eager(speedup) | {"p99_ms": 4.0, "max_difference": 1e-6, "error": 1e-7, "tolerance": 1e-5}]


def _flawed(config):
    return [_against_eager(1.1) | {"flawed_ms": 10.0, "flawed_eager_ms": 22.0, "flawed_speedup": 2.2, "flawed_n": 100}]


def _compiled_training(config):
    speedup = 1.3 if config["backend"].startswith("compile") else 1.0
    return [_against_eager(speedup) | {"precision": "bf16", "loss": 2.3, "eager_loss": 2.3}]


TABLES = [
    (compilers.semantics, _semantics),
    (compilers.deprecations, _deprecations),
    (compilers.fusion, _fusion),
    (compilers.latency, _latency),
    (compilers.flawed, _flawed),
    (compilers.training, _compiled_training),
    (summary.stages, _stages),
    (rush.memory_alone, _memory_alone),
    (experiments.peers, _peers),
    (batching.padding, _padding),
    (batching.sampler_scaling, _sampler_scaling),
    (batching.packing, _packing),
    (batching.batch_time, _batch_time),
    (batching.training, _batching_training),
    (batching.attention, _attention),
    (batching.throughput, _throughput),
    (batching.collator, _collator),
    (rush.ladder, _rung),
    (rush.batch, _rung),
    (rush.checkpointing, _rung),
    (rush.peers, _rush_peers),
    (rush.loading, _loading),
    (rush.norms, _norms),
    (rush.adam, _adam),
    (rush.lecture, _lecture),
    (rush.distributed, _distributed),
    (rush.memory_plan, _memory_plan),
    (rush.scaling, _scaling),
]
