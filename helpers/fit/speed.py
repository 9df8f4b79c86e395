"""How fast a language model trains on GPUs that are not there: `speed`, with the band that published runs showed.

    speed({"gpu": "h100", "count": 8, "params": 8.03e9, "layers": 32, "width": 4096, "seq": 8192, "strategy": "FSDP"})

The time of a token is a sum, and linear in three constants, which are fitted on 317 published runs:

- `products`: floating-point operations of the layers, the head and attention's causal half, at the rate that the
  card's products sustain, times the constant (how much longer a training's products take);
- `scores`: each of attention's scores costs as many exponentials as the constant says, whose units have a rate of their
  own: on cards with faster tensor cores, attention doesn't become as much faster;
- `bytes`: what norms, activations, residuals and casts read and write, per layer, token and value of the width;
- without a constant: the logits, the optimizer, collectives (the runs show none of them hidden: with half of their time
  hidden, errors grow by a tenth), bubbles of a pipeline, and launches where they take longer than all of this.

The fit (`tests/calibrated_speed.py`) minimises absolute errors of logarithms; a source weighs as the root of its number
of runs. The band holds four of five runs whose source the fit had not seen.
"""

import csv
import difflib
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..lab.arguments import LARGEST
from ..lab.cards import LAUNCH_US, Card, card, cards

DATA = Path(__file__).with_name("data")
LINK_SHARE, NETWORK_SHARE = 0.77, 0.94  # of a link's line rate, by collectives: the sources are in `ranks.LINKS`
MACHINE = 8  # GPUs
LOGIT_BYTES = 12  # per token and word: logits and their gradient in 16 bits, each written once and read twice
OPTIMIZER_BYTES = 26  # per parameter: gradient in 16 bits, weight and two moments in 32 are read, these written
LAUNCHES = 51  # per layer and micro-batch: those of a compiled step, as `step` counts them
# Gathers and reductions of the weights: of a micro-batch if they are sharded, else of a step
ROUNDS = {"sharded": 3, "gradients": 2, "replicated": 2}
# By a word in a strategy's name, the first that fits
KINDS = {
    "sharded": ("zero3", "fsdp", "fullshard", "pax", "hsdp"),
    "gradients": ("zero2", "shardgradop"),
    "replicated": ("ddp", "zero1", "zero", "tp", "pp", "none", "single", "offload", "dp", "megatron", "3d"),
}
PRECISIONS = {"bf16": 2, "fp16": 2, "fp8": 2, "tf32": 4, "fp32": 4}  # bytes of an activation
NUMBERS = (
    "count", "params", "linear_params", "layers", "width", "heads", "kv_heads", "ffn", "vocab", "seq",
    "global_batch_seqs", "micro_batch", "tp", "pp",
)  # fmt: skip
NAMES = ("gpu", *NUMBERS, "precision", "strategy", "act_ckpt")
TOKENS = 16384  # of a micro-batch that isn't given
# Fitted: the constants of products, scores and bytes; and the ends of the band, as the logarithm of published over
# predicted speed
THETA = (1.0002392905037971, 9.852241406613862, 286.1856904329975)
BAND = (-0.4317920720972007, 0.18466053260268814)
UNSEEN = 1.5  # how many times wider a band is, on a logarithmic scale, outside what was fitted


def speed(run: Mapping[str, Any], gpu: Card | None = None) -> dict[str, Any]:
    """Tokens a second and GPU of a run named as in published_runs.csv, and the band; `gpu` for a card of your own."""
    chosen = complete(run, gpu)
    parts = seconds([chosen])[0]  # of a token
    per_gpu = 1 / sum(parts.values())
    notes = outside(chosen, parts)
    low, high = (per_gpu * math.exp(q * UNSEEN ** min(len(notes), 2)) for q in BAND)
    device, tokens = chosen["card"], chosen["global_batch_seqs"] * chosen["seq"]
    attended = 12 * chosen["layers"] * chosen["width"] * chosen["seq"]
    return {
        "tokens_per_s_gpu": per_gpu,
        "low": low,
        "high": high,
        "bound": max(parts, key=parts.__getitem__),
        "nearest": nearest(chosen),
        "tokens_per_s": per_gpu * chosen["count"],
        "step_ms": 1e3 * tokens / (per_gpu * chosen["count"]),
        "mfu": per_gpu * (6 * chosen["params"] + attended) / (device.bf16_tflops * 1e12),
        "parts": {name: part * per_gpu for name, part in parts.items()},  # shares of the time
        "notes": notes,
        "run": {name: chosen[name] for name in NAMES},  # with what was filled in
    }


def complete(run: Mapping[str, Any], gpu: Card | None = None) -> dict[str, Any]:
    """A run with all names, checked; a `ValueError`, one line, for the first that is wrong or missing."""
    for name in run:
        if name not in NAMES and (near := difflib.get_close_matches(name, NAMES, 1, 0.7)):
            raise ValueError(f"{name!r} is no name of a run; did you mean {near[0]!r}?")
    given = {name: value for name in NAMES if not _missing(value := run.get(name))}
    if gpu is None and "gpu" not in given:
        raise ValueError(f"gpu is missing; known: {', '.join(cards())}")
    device = gpu or card(given["gpu"])
    out = {name: _number(name, given[name]) for name in NUMBERS if name in given}
    if not {"layers", "width"} <= out.keys() and "params" not in out:
        raise ValueError("the model is missing: give params, or layers and width")
    _shape(out)
    for name in ("count", "tp", "pp"):
        out.setdefault(name, 1)
    if out["count"] % (out["tp"] * out["pp"]):
        raise ValueError(f"count is {out['count']:g}; it must be a multiple of tp × pp, {out['tp'] * out['pp']:g}")
    copies = out["count"] / out["tp"] / out["pp"]
    out.setdefault("seq", 2048)
    share = max(1, out["global_batch_seqs"] / copies) if "global_batch_seqs" in out else math.inf
    out["micro_batch"] = min(out.get("micro_batch", max(1, TOKENS // out["seq"])), share)
    out.setdefault("global_batch_seqs", out["micro_batch"] * copies * (4 * out["pp"] if out["pp"] > 1 else 1))
    precision = str(given.get("precision", "bf16")).lower().removeprefix("amp-")
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {given['precision']!r}; valid: {', '.join(PRECISIONS)}")
    if precision == "fp8" and not device.sustained("fp8"):
        raise ValueError(f"precision is 'fp8', which {device.gpu} has no units for")
    # 16 bytes a parameter: weight, gradient and moments
    large = 16 * out["params"] / out["tp"] / out["pp"] > 0.7 * 2**30 * (device.memory_gib or math.inf)
    strategy = given.get("strategy", "none" if copies == 1 else "FULL_SHARD" if large else "DDP")
    checkpointing = str(given.get("act_ckpt", False)).lower() not in ("false", "none", "0", "0.0", "no")
    return out | {
        "card": device,
        "gpu": device.gpu,
        "precision": precision,
        "act_ckpt": checkpointing,
        "strategy": strategy,
        "kind": kind(strategy),
        "copies": copies,
        "accumulate": max(out["global_batch_seqs"] / copies / out["micro_batch"], 1),
    }


def kind(strategy: str) -> str:
    """What of the weights, gradients and moments is sharded: "sharded" is all, "gradients" the last two."""
    name = str(strategy).lower().replace("-", "").replace("_", "").replace(" ", "")
    for kind, words in KINDS.items():
        if any(word in name for word in words):
            return kind
    raise ValueError(f"strategy is {strategy!r}; valid: none, DDP, FULL_SHARD, SHARD_GRAD_OP, zero1, zero2, zero3")


def _missing(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < LARGEST:
        raise ValueError(f"{name} is {value!r:.40}; it must be a number above 0 and below {LARGEST:.0e}")
    return number


def _shape(out: dict[str, Any]) -> None:
    """Fill in a model's shape: what is usual for its width and parameters."""
    out.setdefault("vocab", 50304)
    if "width" not in out:  # a hundred times as wide as deep, unless the depth is given
        rest = out["params"] / 12
        out["width"] = 64 * max(1, round((rest / out["layers"]) ** 0.5 / 64 if "layers" in out
                                         else (rest * 100) ** (1 / 3) / 64))  # fmt: skip
    width, embedding = out["width"], out["vocab"] * out["width"]
    out.setdefault("layers", max(1, round(out.get("params", 0) / 12 / width**2)))
    out.setdefault("heads", max(1, width // (64 if width <= 1024 else 128)))
    out.setdefault("kv_heads", out["heads"])
    out.setdefault("ffn", 4 * width)
    attention = 2 * width**2 * (1 + out["kv_heads"] / out["heads"])
    # with and without a gate; a table that an untied input embedding adds has no products
    guesses = [out["layers"] * (attention + matrices * width * out["ffn"]) for matrices in (2, 3)]
    usual = guesses[out["ffn"] != 4 * width]
    out.setdefault("params", usual + embedding)
    if "linear_params" not in out:
        possible = {abs(guess + tables * embedding - out["params"]): guess for guess in guesses for tables in (1, 2)}
        difference = min(possible)
        near = difference < 0.1 * out["params"]
        out["linear_params"] = possible[difference] if near else max(out["params"] - embedding, 0.5 * out["params"])


def terms(runs: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Of each run's token: what the three constants multiply (runs, 4: head and layers, attention's products, scores,
    bytes), and seconds without a constant (runs, 4: logits, optimizer, communication, launches)."""
    column = {name: np.array([run[name] for run in runs], float) for name in (*NUMBERS, "copies", "accumulate")}
    count, layers, width, seq = (column[name] for name in ("count", "layers", "width", "seq"))
    tp, pp, vocab = column["tp"], column["pp"], column["vocab"]
    copies, accumulate, tokens = column["copies"], column["accumulate"], column["micro_batch"] * seq
    devices = [run["card"] for run in runs]
    precisions = [run["precision"] for run in runs]
    plain = ["bf16" if precision == "fp8" else precision for precision in precisions]
    rate, sixteen = (np.array(list(map(Card.sustained, devices, names))) * 1e12 for names in (precisions, plain))
    special, memory, link = (
        np.array([getattr(c, name) for c in devices]) * scale
        for name, scale in (("special_tops", 1e12), ("gb_per_s", 1e9), ("link_gb_per_s", LINK_SHARE * 1e9))
    )
    network = np.array([c.network_gb_per_s for c in devices]) * NETWORK_SHARE * 1e9
    again = np.array([run["act_ckpt"] for run in runs], float)  # the forward pass, a second time
    size = np.array([PRECISIONS[precision] for precision in precisions])
    sharded = np.array([run["kind"] == "sharded" for run in runs])
    split = sharded | np.array([run["kind"] == "gradients" or run["strategy"] in ("none", "offload") for run in runs])
    rounds = np.array([ROUNDS[run["kind"]] for run in runs])

    shared, bubble = tp * pp, 1 + (pp - 1) / accumulate  # GPUs that hold one copy of the model
    scores = layers * column["heads"] * seq / 2
    linear = ((6 + 2 * again) * column["linear_params"] / rate + 6 * vocab * width / sixteen) * bubble
    # two products of the head's width forward, five backward, as the scores are computed again
    attended = scores * 4 * width / column["heads"] * (3.5 + again) / sixteen * bubble
    exponentials = scores * (2 + again) / special * bubble
    moved = layers * width * size / 2 * (1 + again / 3) / memory * bubble

    local = column["params"] / shared  # of one GPU's share of the model, in a step of `accumulate` micro-batches
    optimizer = OPTIMIZER_BYTES * local / np.where(split, copies, 1) / memory / (accumulate * tokens) * shared
    each = rounds * local * size * (copies - 1) / copies / np.where(sharded, tokens, accumulate * tokens) * shared
    slowest = np.maximum(1 / link, np.where(count > MACHINE, 1 / MACHINE / network, 0))  # a ring per adapter
    # tensor parallel: a layer has four all-reduces, which send each number twice and keep all of its GPUs
    between = each * slowest + layers * 8 * width * 2 * (tp - 1) / link
    logits = vocab * LOGIT_BYTES / memory * bubble
    launches = layers / pp * LAUNCHES * LAUNCH_US * 1e-6 / tokens * shared
    multiplied, fixed = (linear, attended, exponentials, moved), (logits, optimizer, between, launches)
    return np.stack(multiplied, 1), np.stack(fixed, 1)


def seconds(runs: Sequence[Mapping[str, Any]], theta: Sequence[float] = THETA) -> list[dict[str, float]]:
    """Seconds of a token of each run, by part."""
    parts = []
    for multiplied, fixed in zip(*terms(runs), strict=True):
        (linear, attended, exponentials, moved), (logits, optimizer, between, launches) = multiplied, fixed
        part = dict(
            products=theta[0] * linear,
            attention=theta[0] * attended + theta[1] * exponentials,
            memory=theta[2] * moved + logits,
            optimizer=optimizer,
            communication=between,
        )
        part["launches"] = max(launches - sum(part.values()), 0.0)  # beyond what the GPU computes
        parts.append({name: float(value) for name, value in part.items()})
    return parts


@functools.cache
def published() -> list[dict[str, Any]]:
    """The published runs, completed; `predicted` is the speed by a fit without the run's source."""
    with (DATA / "published_runs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [
        row | complete(row) | {name: float(row[name] or "nan") for name in ("tok_s_gpu", "predicted")} for row in rows
    ]


def outside(run: Mapping[str, Any], parts: Mapping[str, float]) -> list[str]:
    """What of a run no published run is like, in words."""
    notes = []
    if run["gpu"] not in {known["gpu"] for known in published()}:
        notes.append(f"no published run is on {run['gpu']}: the band is wider")
    if parts["launches"]:
        notes.append("kernels this short are launched more slowly than they run, unless captured or compiled")
    if not run["card"].bf16_units and run["precision"] == "bf16":
        notes.append(f"{run['gpu']} has no bf16 units: fp16 is taken, and attention there is slower than predicted")
    if run["precision"] in ("fp32", "tf32"):
        notes.append("two published runs are in fp32, both slower than predicted")
    return notes


def nearest(run: Mapping[str, Any], number: int = 3) -> list[dict[str, Any]]:
    """The published runs that are most like a run, with their speed and link."""

    def apart(known: Mapping[str, Any]) -> float:
        ratios = (("params", 1.0), ("seq", 0.4), ("count", 0.15), ("micro_batch", 0.1))
        same = (("gpu", 1.5), ("precision", 0.7), ("kind", 0.3), ("act_ckpt", 0.5))
        distance = sum(w * abs(math.log(run[n] / known[n])) for n, w in ratios)
        return distance + sum(w * (run[n] != known[n]) for n, w in same)

    shown = ("source", "gpu", "count", "model", "seq", "micro_batch", "precision", "strategy", "act_ckpt", "tok_s_gpu",
             "link")  # fmt: skip
    return [{name: known[name] for name in shown} for known in sorted(published(), key=apart)[:number]]


def shorter(run: Mapping[str, Any], gpu: Card | None = None) -> dict[str, float]:
    """Changes that would make a run at least 3 % faster, with their gain, the largest first."""
    chosen, now = complete(run, gpu), speed(run, gpu)["tokens_per_s_gpu"]
    batch, device = 2 * chosen["micro_batch"], chosen["card"]
    whole = max(chosen["global_batch_seqs"], batch * chosen["copies"])
    changes = {
        "micro-batch doubled": {"micro_batch": batch, "global_batch_seqs": whole},
        "recomputation off": {"act_ckpt": False},
        "bf16": {"precision": "bf16"},
    }
    if device.sustained("fp8"):
        changes["fp8"] = {"precision": "fp8"}
    # Weights, gradients and moments of DDP are whole on each GPU, of SHARD_GRAD_OP only the weights.
    for strategy, size in (("DDP", 16), ("SHARD_GRAD_OP", 4)):
        if size * chosen["params"] / chosen["tp"] / chosen["pp"] < 0.7 * 2**30 * device.memory_gib:
            changes[strategy] = {"strategy": strategy}
    gains = {name: speed({**run, **change}, gpu)["tokens_per_s_gpu"] / now for name, change in changes.items()}
    return {name: gain for name, gain in sorted(gains.items(), key=lambda pair: -pair[1]) if gain > 1.03}
