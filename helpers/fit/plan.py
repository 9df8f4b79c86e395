"""Where a training step's memory goes, whether it fits, and what would make it fit: `fit`. And its time.

    row = fit(Plan(model="llama-3.2-1b", batch=8, sequence=2048, strategy="zero3", ranks=8), memory_gib=24)
    row["fits"], row["parts_gib"], row["largest_batch"], row["switches"]
    print(text(row))

Nothing is allocated or computed: it takes some seconds on any machine. The training code runs on fake tensors with two
layers and with three; the peak of all layers follows from the difference. These peaks are those measured on the
uncompiled steps of the ladder. Kernels' workspaces, fragmentation and the driver's memory (about 1 GiB on a GPU) aren't
counted. A compiler saves fewer activations: compiled setups need less.
"""

import contextlib
import functools
import gc
import importlib
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..distributed import Job
from ..lab import cpu
from ..lab.arguments import check_at_least, check_choice
from ..lab.cards import Card
from ..lab.machine import device
from ..lab.memory import GIB
from ..lab.process import without_ctrl_c, workers
from ..models.llama import preset
from ..rush import Setup
from ..rush.rates import parameters
from .anybody import builder, count_model, read_config
from .ledger import Peak
from .ranks import rank_peak
from .speed import shorter, speed
from .step import count

STRATEGIES = ("single", "ddp", "zero2", "zero3")
# What can be counted on one device, on many, and of other people's models
ONE = {
    "precision": ("fp32", "amp-bf16", "bf16"),
    "checkpointing": ("none", "selective", "full"),
    "head": ("full", "chunked"),
}
MANY = ONE | {"precision": ("fp32", "amp-bf16"), "head": ("full",)}
THEIRS = {"strategy": ("single",), "checkpointing": ("none", "full"), "head": ("full",)}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be trained and how: with attention without scores in memory, and fused AdamW."""

    model: str = "llama-3.2-1b"
    batch: int = 8  # sequences of a step, over all ranks
    sequence: int = 2048
    strategy: str = "single"
    ranks: int = 1
    precision: str = "amp-bf16"
    checkpointing: str = "none"
    head: str = "full"

    def check(self) -> None:
        """A `ValueError`, one line, for the first thing that is unknown or can't be trained."""
        check_choice(STRATEGIES, strategy=self.strategy)
        alone = self.strategy == "single"
        self.check_choices(ONE if alone else MANY)
        check_at_least(1, ranks=self.ranks)
        plan = replace(self, model="llama-3.1-8b") if self.theirs else self
        if alone and self.ranks == 1:
            _ = plan.setup  # checks itself
        else:
            plan.job.check(self.ranks)

    def check_choices(self, valid: dict[str, tuple[str, ...]]) -> None:
        for name, choices in valid.items():
            check_choice(choices, **{name: getattr(self, name)})

    @property
    def theirs(self) -> bool:
        """Whether the model is somebody else's: a configuration, a class of transformers, or a function's."""
        return ":" in self.model or self.model.endswith(".json") or self.model[:1].isupper()

    @property
    def setup(self) -> Setup:
        """The plan on one device."""
        same = {name: getattr(self, name) for name in ("model", "batch", "sequence", "precision", "checkpointing")}
        residual = "bf16" if self.precision == "amp-bf16" else "weights"
        return Setup(**same, head=self.head, attention="flash", optimizer="fused", residual=residual)

    @property
    def job(self) -> Job:
        """The plan on many ranks."""
        same = {name: value for name, value in asdict(self).items() if name not in ("ranks", "head")}
        return Job(**same)


@functools.lru_cache(maxsize=256)
def peak(plan: Plan) -> Peak:
    """The peak of a plan, counted on fake tensors; it takes about a second, of other people's models up to ten."""
    plan.check()
    if plan.theirs:
        plan.check_choices(THEIRS)
        return count_model(plan.model, plan.batch, plan.sequence, plan.precision, plan.checkpointing)
    return count(plan.setup) if plan.strategy == "single" else rank_peak(plan.job, plan.ranks)


def fit(plan: Plan, memory_gib: float | None = None, forks: int = 0) -> dict[str, Any]:
    """Parts, peak, whether it fits in `memory_gib` (by default this machine's device), the largest batch that does, and
    switches with their peaks.

    Forks of this process count switches beside it. It must not have used a GPU, nor have threads that hold locks, nor
    have run a backward pass if torch is built for CUDA, whose autograd refuses to go on in a fork.
    """
    memory_gib = this_memory_gib() if memory_gib is None else memory_gib
    if not 0 < memory_gib <= 2**20:
        raise ValueError(f"memory is {memory_gib}; it must be above 0 and at most {2**20} GiB")
    limit = memory_gib * GIB
    switches: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        ahead: dict[Plan, Future[Peak]] = {}
        if forks:
            importlib.import_module("torch._dynamo")  # which torch would import in each of them
            if plan.theirs:
                builder(plan.model)  # before the forks, which find its imports done
            pool = stack.enter_context(workers(forks, "fork"))
            gc.freeze()  # what is imported isn't looked through again
            longest_first = [replace(plan, **change) for change in reversed(changes(plan, 0))]
            with without_ctrl_c():
                ahead = {other: pool.submit(peak, other) for other in longest_first}
        needed, largest = peak(plan), largest_batch(plan, limit)  # after the forks, as it runs backward
        for change in changes(plan, largest):
            changed = replace(plan, **change)
            with contextlib.suppress(ValueError):  # not all of other people's models can checkpoint
                size = (ahead[changed].result() if changed in ahead else peak(changed)).bytes
                switches.append({"change": change, "peak_gib": size / GIB, "fits": size <= limit})
    return asdict(plan) | {
        "memory_gib": memory_gib,
        "parts_gib": {part: size / GIB for part, size in needed.parts.items()},
        "moment": needed.moment,
        "peak_gib": needed.bytes / GIB,
        "fits": needed.bytes <= limit,
        "largest_batch": largest,
        "switches": switches,
    }


def largest_batch(plan: Plan, limit: float) -> int:
    """The largest batch whose peak is at most `limit` bytes; a multiple of the ranks; 0 if not even the least fits."""

    if plan.theirs:  # counting takes long: as many sequences again need as many bytes again
        now, twice = peak(plan).bytes, peak(replace(plan, batch=2 * plan.batch)).bytes
        return max(0, plan.batch + int((limit - now) * plan.batch / max(twice - now, 1)))

    def size(sequences: int) -> int:  # of each rank
        return peak(replace(plan, batch=sequences * plan.ranks)).bytes

    low, high = 1, 2
    if size(low) > limit:
        return 0
    while size(high) <= limit:  # the peak is a maximum of lines, so the next batch on the last line is rarely too small
        more = (limit - size(high)) / max(size(high) - size(low), 1) * (high - low)
        low, high = high, high + int(more) + 1
    between = low + int((limit - size(low)) / (size(high) - size(low)) * (high - low))  # below the chord
    while high - low > 1:
        between = min(max(between, low + 1), high - 1)
        low, high = (between, high) if size(between) <= limit else (low, between)
        between = (low + high) // 2
    return low * plan.ranks


def changes(plan: Plan, largest: int) -> list[dict[str, Any]]:
    """The switches that a plan doesn't have yet, and pairs of them."""
    checkpointing, chunked = {"checkpointing": "full"}, {"head": "chunked"}
    if plan.theirs:
        given = [checkpointing, {"precision": "bf16"}]
    elif plan.strategy == "single":
        ranks = next((n for n in (8, 4, 2) if plan.batch % n == 0), 2)
        given = [{"checkpointing": "selective"}, checkpointing, chunked, checkpointing | chunked]
        given += [{"precision": "bf16"}, {"precision": "bf16"} | checkpointing | chunked]
        shared = {"ranks": ranks, "precision": "fp32" if plan.precision == "fp32" else "amp-bf16", "head": "full"}
        shared |= {"checkpointing": "none" if plan.checkpointing == "none" else "full"}
        given += [shared | {"strategy": strategy} for strategy in ("zero2", "zero3")] if plan.batch % ranks == 0 else []
    else:
        given = [{"precision": "amp-bf16"}, checkpointing, {"strategy": "zero2"}, {"strategy": "zero3"}]
        given += [{"strategy": "zero3"} | checkpointing]
        given += [{"ranks": 2 * plan.ranks}] if plan.batch % (2 * plan.ranks) == 0 else []
    given += [{"batch": largest}] if 0 < largest < plan.batch else []
    new = [{name: value for name, value in change.items() if value != getattr(plan, name)} for change in given]
    return [change for number, change in enumerate(new) if change and change not in new[:number]]


def this_memory_gib() -> float:
    """The memory of this machine's device."""
    if device().type == "cuda":
        return torch.cuda.get_device_properties(device()).total_memory / GIB
    if (gib := cpu.memory_gib()) is None:
        raise ValueError("this system doesn't tell its memory; give it in GiB")
    return gib


def text(row: dict[str, Any]) -> str:
    """A row of `fit` in lines of at most 100 columns."""
    ranks, memory = row["ranks"], row["memory_gib"]
    many = f"{row['strategy']} over {ranks} ranks" if row["strategy"] != "single" else "one device"
    each = f" ({row['batch'] / ranks:g} a rank)" if ranks > 1 else ""
    lines = [
        f"{row['model']}, batch {row['batch']}{each} × {row['sequence']} tokens, {many}, {row['precision']}",
        f"checkpointing {row['checkpointing']}, head {row['head']}; GiB a rank at the peak ({row['moment']}):",
        *(f"  {part:<16}{size:9.2f}" for part, size in row["parts_gib"].items()),
        f"  {'peak':<16}{row['peak_gib']:9.2f}  {'fits in' if row['fits'] else 'does not fit in'} {memory:.1f} GiB",
        "uncompiled; without workspaces of kernels, fragmentation and the driver's memory",
        f"largest batch that fits: {row['largest_batch'] or f'none; the least is {ranks}'}",
        "switches:",
    ]
    for switch in row["switches"]:
        change = ", ".join(f"{name} {value}" for name, value in switch["change"].items())
        lines.append(f"  {change:<62}{switch['peak_gib']:9.2f}  {'fits' if switch['fits'] else 'does not fit'}")
    return "\n".join(lines)


# Time

# The strategies' names in published runs
PUBLISHED = {"single": "none", "ddp": "DDP", "zero2": "SHARD_GRAD_OP", "zero3": "FULL_SHARD"}
# A run's names, and those that configurations of transformers have for them
CONFIGURED = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
}


def plan_run(plan: Plan) -> dict[str, Any]:
    """A plan as a run of `speed`, without its GPU; somebody else's model is known by its config.json."""
    plan.check()
    return {
        **(config_shape(Path(plan.model)) if plan.theirs else preset_shape(plan.model)),
        "count": plan.ranks,
        "seq": plan.sequence,
        "global_batch_seqs": plan.batch,
        "micro_batch": plan.batch / plan.ranks,
        "precision": plan.precision,
        "strategy": PUBLISHED[plan.strategy],
        "act_ckpt": plan.checkpointing == "full",
    }


def preset_shape(model: str) -> dict[str, Any]:
    size = preset(model)
    shape = {name: size[name] for name in ("layers", "width", "heads", "kv_heads")}
    return shape | {"params": parameters(model), "ffn": size["feedforward_size"], "vocab": size["vocab_size"]}


def config_shape(path: Path) -> dict[str, Any]:
    """The shape of a language model in a transformers `config.json`; what isn't there is usual."""
    if path.suffix != ".json":
        raise ValueError(f"time is predicted of a language model's config.json, not of {path}")
    config = read_config(path)
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    shape = {name: next((config[key] for key in keys if config.get(key)), None) for name, keys in CONFIGURED.items()}
    if missing := [" or ".join(CONFIGURED[name]) for name in ("layers", "width", "vocab") if not shape[name]]:
        raise ValueError(f"{path} has no {missing[0]}: not the configuration of a language model")
    return shape


def estimate(run: Mapping[str, Any], gpu: Card | None = None, price: float | None = None) -> dict[str, Any]:
    """`speed` with what would make the run faster and, at a `price` a GPU and hour, the cost of 10⁹ tokens."""
    result = speed(run, gpu) | {"shorter": shorter(run, gpu)}
    if price is not None:
        result["cost_of_1e9_tokens"] = price / 3600 * 1e9 / result["tokens_per_s_gpu"]
    return result


def estimate_text(row: Mapping[str, Any]) -> str:
    """An `estimate` in lines of at most 100 columns."""
    run, each = row["run"], row["tokens_per_s_gpu"]
    model = f"{run['params'] / 1e9:.3g}B parameters, {run['seq']:g} tokens × {run['micro_batch']:g}"
    lines = [
        f"on {run['count']:g} × {run['gpu']}, {model} a micro-batch, {run['precision']}, {run['strategy']}:",
        f"  tokens/s a GPU {each:12,.0f}  ({row['low']:,.0f} to {row['high']:,.0f}: four of five such runs)",
        f"  step           {row['step_ms']:12,.0f} ms of {run['global_batch_seqs']:g} sequences",
        f"  MFU            {row['mfu']:12.0%}  ({row['mfu'] * row['low'] / each:.0%} to "
        f"{row['mfu'] * row['high'] / each:.0%}) of the datasheet's bf16 peak",
    ]
    if "cost_of_1e9_tokens" in row:
        least, most = (row["cost_of_1e9_tokens"] * each / row[side] for side in ("high", "low"))
        lines.append(f"  10⁹ tokens     {row['cost_of_1e9_tokens']:12,.2f}  ({least:,.2f} to {most:,.2f})")
    shares = sorted(row["parts"].items(), key=lambda part: -part[1])
    lines.append(f"  bound by {row['bound']}: " + ", ".join(f"{name} {share:.0%}" for name, share in shares[:4]))
    lines += [f"  {note}" for note in row["notes"]]
    gains = ", ".join(f"{name} {gain:.2f}×" for name, gain in list(row["shorter"].items())[:3])
    lines += [f"  faster, if it fits: {gains}"] if gains else []
    lines.append("nearest published runs, tokens/s a GPU:")
    for near in row["nearest"]:
        lines.append(
            f"  {near['tok_s_gpu']:>9,.0f}  {near['model']}, {near['count']:g} × {near['gpu']}, "
            f"{near['seq']:g} tokens × {near['micro_batch']:g}, {near['precision']}, {near['strategy']}"
        )
        lines.append(f"             {near['link']}")
    return "\n".join(lines)
