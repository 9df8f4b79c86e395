"""What 8-bit activations cost in loss: a small Llama trained with each level."""

from functools import partial
from types import SimpleNamespace

import pandas as pd
import torch
from torch import Tensor, nn

from ...book import Worth
from ...book.table import table
from ...book.values import Number, derived, mean_of
from ...lab import device, half_dtype, multiplies_half
from ...lab.rows import Row
from ...models.llama import PRESETS, Llama
from ...swiglu import MemoryOptimizedSwigluMLP
from ...text import SyntheticText
from .sizes import LEVEL


@table(
    small=[{"seed": 0, "checkpoint_level": level, "steps": 20} for level in (0, 3)],
    cpu=[{"seed": seed, "checkpoint_level": level, "steps": 400} for seed in range(3) for level in (0, 3)],
    version=2,
    columns=("first_loss", "final_loss", "dtype", "source"),
    worth=Worth(6, "a training with each level", cpu=21.3, gpu=8, big_gpu=6),
)
def training(seed: int, checkpoint_level: int, steps: int) -> Row:
    """Validation loss of a small Llama after training on generated text: what 8-bit activations cost.

    The weights are in fp32; where the machine multiplies 16-bit numbers fast, products are under autocast.
    """
    torch.manual_seed(seed)
    model = Llama.from_name("tiny", mlp=partial(MemoryOptimizedSwigluMLP, checkpoint_level=checkpoint_level))
    model, half = model.to(device()), multiplies_half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    words, text = PRESETS["tiny"]["vocab_size"], SyntheticText(20_000, 2 * seed, PRESETS["tiny"]["vocab_size"])
    new = _windows(SyntheticText(1_000, 1, words))

    def loss(windows: Tensor) -> Tensor:
        with torch.autocast(device().type, half_dtype(), enabled=half):
            logits = model(windows[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    def validation() -> float:
        with torch.no_grad():
            return float(sum(loss(part) for part in new.split(32)) / len(new.split(32)))

    first, windows = validation(), _windows(text)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    for indices in order[: 16 * steps].split(16):
        optimizer.zero_grad()
        loss(windows[indices]).backward()
        optimizer.step()
    dtype = str(half_dtype() if half else torch.float32).removeprefix("torch.")
    return {"first_loss": first, "final_loss": validation(), "dtype": dtype, "source": text.source}


def _windows(text: SyntheticText, length: int = 129) -> Tensor:
    """(N, length) All of its tokens on the device, one after the other."""
    whole = len(text.ids) // length * length
    return torch.from_numpy(text.ids[:whole].astype("int64")).view(-1, length).to(device())


@training.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Held-out losses with level 0 and level 3, as means over the seeds, and their difference at equal seeds."""
    by_seed = rows.pivot(index="seed", columns=LEVEL, values="final_loss").reindex(columns=[0, 3])
    return SimpleNamespace(
        exact=Number(by_seed[0].mean(), "nats", missing="level 0", decimals=2),
        rounded=Number(by_seed[3].mean(), "nats", missing="level 3", decimals=2),
        first=Number(rows["first_loss"].mean(), "nats", decimals=2),
        seeds=derived(rows["seed"].nunique(), "counted", "", 0),
        excess=mean_of(by_seed[3] - by_seed[0], "nats", "level 3", 4),
        model=f"{rows['dtype'].iloc[0]}, {rows['source'].iloc[0].partition(',')[0]}",
    )
