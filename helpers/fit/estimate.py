"""What `dlspeed fit --gpu` says of a plan's time: a plan or a transformers configuration as a run, and the text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..lab.cards import Card
from ..models.llama import preset
from ..rush.rates import parameters
from .anybody import read_config
from .plan import Plan
from .speed import shorter, speed

STRATEGIES = {"single": "none", "ddp": "DDP", "zero2": "SHARD_GRAD_OP", "zero3": "FULL_SHARD"}
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
        "strategy": STRATEGIES[plan.strategy],
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
