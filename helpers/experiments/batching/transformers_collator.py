"""transformers' padding-free collator and our packs, which feed the same model.

The collator joins the samples of a random batch, so that each batch has another length; our packs have one length,
which one compiled graph serves. Both feed transformers' Llama. On a GPU its attention is torch's varlen kernel,
FlashAttention-2, for both.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from helpers.batching import SequencedDataset, StandardDataset, causal_attention
from helpers.batching.attention import without_cudnn_attention
from helpers.batching.documents import documents_attention
from helpers.batching.packed import Packed
from helpers.lab import device, experiment
from helpers.lab.machine import NOT_INSTALLED
from helpers.lab.records import STATUS, Row
from helpers.lab.timing import relative_error
from helpers.text import SyntheticText

from .inputs import MAX_LENGTH, compute_dtype, dtype_name, text
from .step_times import RATE_COLUMNS, Steps, rates, training_step

Inputs = dict[str, Any]
ATTENTION, SDPA = "varlen", "sdpa"  # ours, registered with transformers, and what transformers has on a CPU
IGNORED = -100  # a label that counts for nothing
COLLATOR, PACKS = "flattening collator", "packs of one length"


@experiment(
    small=[{"width": 32, "layers": 1, "batch_size": 4, "rounds": 20}],
    cpu=[{"width": 512, "layers": 2, "batch_size": 32, "rounds": 12}],
    gpu=[{"width": 512, "layers": 4, "batch_size": 32, "rounds": 30}],
    big_gpu=[{"width": 1024, "layers": 8, "batch_size": size, "rounds": 60} for size in (64, 256)],
    version=2,
    same_work=False,  # each step takes another batch
    columns=(*RATE_COLUMNS, "ratio_to_collator", "error", "dtype", "baseline"),
)
@without_cudnn_attention()
def collator(width: int, layers: int, batch_size: int, rounds: int) -> list[Row]:
    """Training steps of transformers' Llama, fed by its padding-free collator and by packs, in one interleaved run.

    The same weights and optimizer, each eager and compiled: the collator's batches all have another length, so theirs
    for any, and packs have one. On a GPU both have the same attention; on a CPU the collator has SDPA under the dense
    mask that transformers makes of its position_ids, and packs have ours. Batches are made before. `error` is that of a
    small model's logits for joined samples against each by itself: a leak between documents would show there.
    """
    count = 20 if device().type == "cuda" else 10
    try:
        theirs = ATTENTION if device().type == "cuda" else SDPA
        errors = {COLLATOR: _leak(theirs), PACKS: _leak(ATTENTION)}
        variants = _llama_steps(width, layers, batch_size, count, theirs)
    except ImportError:
        return [{"variant": variant, STATUS: f"{NOT_INSTALLED}transformers"} for variant in (COLLATOR, PACKS)]
    rows = rates(variants, rounds, warmup=count)
    for row in rows:
        row["ratio_to_collator"] = row["real_tokens_per_s"] / rows[0]["real_tokens_per_s"]
        row["error"] = errors[row["variant"].removesuffix(", compiled")]
    return [row | {"dtype": dtype_name(), "baseline": COLLATOR} for row in rows]


def _llama_steps(width: int, layers: int, batch_size: int, count: int, theirs: str) -> dict[str, Steps]:
    """Training steps of a Llama, eager and compiled, on `count` batches of the collator and on as many packs."""
    samples = text(24 * batch_size, width)
    dataset = StandardDataset(samples, MAX_LENGTH)

    def model(attention: str) -> nn.Module:
        return llama(len(samples.vocab), width, layers, 8, attention).to(device=device(), dtype=compute_dtype())

    joined = list(islice(flattened(dataset, batch_size, 0, flash=theirs != SDPA), count))
    capacity = max(round(batch_size * float(dataset.lengths.mean())), MAX_LENGTH)
    sequences = SequencedDataset(dataset, None, capacity, strategy="best-fit", fixed=True)
    packs = [as_inputs(packed, MAX_LENGTH) for packed in islice(sequences, count)]
    on_collator, on_packs = model(theirs), model(ATTENTION)
    return {
        COLLATOR: _steps(on_collator, joined),
        PACKS: _steps(on_packs, packs),
        f"{COLLATOR}, compiled": _steps(torch.compile(on_collator, dynamic=True), joined),
        f"{PACKS}, compiled": _steps(torch.compile(on_packs), packs),
    }


def _steps(model: nn.Module, batches: list[Inputs]) -> Steps:
    real = float(np.mean([int((inputs["labels"] != IGNORED).sum()) for inputs in batches]))
    step = training_step(model.parameters(), lambda inputs: model(**inputs).loss)
    return Steps(step, [_on_device(inputs) for inputs in batches], real)


def _on_device(inputs: Inputs) -> Inputs:
    return {name: value.to(device()) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _leak(attention: str) -> float:
    """The relative error of a small Llama's logits for joined samples, against each sample by itself; fp32."""
    dataset = StandardDataset(SyntheticText(8, vocab_size=500), 64)
    model = llama(500, 64, 2, 2, attention).to(device())
    (inputs,) = flattened(dataset, len(dataset), 0, flash=attention == ATTENTION)
    bounds = (inputs["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    with torch.no_grad():
        joined = model(**_on_device(inputs)).logits[0]
        alone = [model(part[None].to(device())).logits[0] for part in inputs["input_ids"][0].tensor_split(bounds[1:])]
    return relative_error(joined, torch.cat(alone))


def llama(vocab_size: int, width: int, layers: int, heads: int, attention: str = ATTENTION) -> nn.Module:
    """A Llama of transformers with random weights, the same in each call."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register(ATTENTION, _attention)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        attn_implementation=attention,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def flattened(dataset: StandardDataset, batch_size: int, seed: int, flash: bool) -> Iterator[Inputs]:
    """Random batches as transformers' collator joins them; `flash` adds the offsets that FlashAttention takes."""
    from transformers import DataCollatorWithFlattening

    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=flash)
    order = np.random.default_rng(seed).permutation(len(dataset))
    for begin in range(0, len(order) - batch_size + 1, batch_size):
        yield dict(collate([{"input_ids": dataset[int(i)].tolist()} for i in order[begin : begin + batch_size]]))


def as_inputs(packed: Packed, longest: int) -> Inputs:
    """A packed sequence as the same model takes it. `longest` is a bound, the same for all batches."""
    offsets = torch.from_numpy(packed.layout().offsets.copy())
    labels = packed.tokens.clone()
    labels[packed.positions == 0] = IGNORED  # a document's first token follows from nothing; nor does padding
    inputs = {"input_ids": packed.tokens[None], "labels": labels[None], "position_ids": packed.positions[None]}
    inputs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), offsets)
    return inputs | dict.fromkeys(("max_length_q", "max_length_k"), longest)


def _attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for q, k and v of (1, heads, T, head_dim); the result is (1, T, heads, head_dim)."""
    if cu_seq_lens_q is None:
        return causal_attention(q, k, v).transpose(1, 2), None
    if not q.is_cuda:
        return documents_attention(q, k, v, cu_seq_lens_q, scaling).transpose(1, 2), None
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))  # (T, heads, head_dim)
    bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return varlen_attn(q, k, v, *bounds, scale=scaling, window_size=(-1, 0))[None], None
