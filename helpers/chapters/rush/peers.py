"""The same training by transformers, with Liger and compile too, against the best setup."""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd

from ...book.table import Worth, table
from ...book.values import TIMES, Number, derived, lacking, paired, timed
from ...lab import Row, missing_because
from . import transformers_llama
from .setups import FULL, MEDIUM, ON_CPU, SMALL, SPREAD, apart, missing, setup_of
from .transformers_llama import ALIKE

LIGER_ALIKE = f"transformers, liger-kernel, fused AdamW, compile{ALIKE}"


@table(
    small=[SMALL | {"variant": "transformers"}],
    cpu=[
        ON_CPU | {"variant": variant}
        for variant in (
            "transformers, eager attention",
            "transformers",
            "transformers, fused AdamW, compile",
            f"transformers, fused AdamW, compile{ALIKE}",
        )
    ],
    gpu=[MEDIUM | {"variant": variant} for variant in transformers_llama.VARIANTS],
    big_gpu=[FULL | {"variant": variant} for variant in transformers_llama.VARIANTS],
    version=3,
    missing=lambda variant, **sizes: (
        missing_because(*transformers_llama.needs(variant), "native bf16") or missing(**sizes)
    ),
    columns=f"median_ms {SPREAD} baseline baseline_ms ratio text step_gib ours_step_gib loss ours_loss",
    worth=Worth(40, "the same training by transformers and Liger", cpu=50.3, gpu=40, big_gpu=22),
)
def peers(model: str, sequence: int, variant: str) -> Row:
    """The same model with the same weights and batch, trained by transformers and by us, in turn in one process.

    Both have the process's allocator, which on a CPU is the best rung's. Of 140 GB they need 100 at a batch of 4.
    """
    setup = setup_of(model, sequence)
    setup = replace(setup, batch=min(setup.batch, 4))
    return apart(setup, transformers_llama.against, variant, setup)


@peers.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """transformers' step against ours, trained in turn in one process."""
    names = ["variant", "speedup", "step_gib", "ours_step_gib", "loss", "ours_loss"]
    heads = {"speedup": "our speedup", "step_gib": "added by a step, GiB", "ours_step_gib": "ours, GiB"}
    rows = rows.assign(speedup=[paired(row) for row in rows.to_dict("records")])
    rows.loc[rows["ours_step_gib"] == 0, "ours_step_gib"] = None  # of a graph's replay, which adds no memory
    shown = rows.assign(speedup=rows["speedup"].map(str))
    every, rows = rows, rows[~rows["variant"].str.endswith(ALIKE)]
    alike = dict(zip(every["variant"], every["speedup"], strict=True))
    rows = rows if len(rows) else every
    fastest = rows.loc[rows["ratio"].idxmin()]
    compiled = rows[rows["variant"].str.contains("compile")].sort_values("ratio")["speedup"]
    return SimpleNamespace(
        variants=timed(shown, names).rename(columns=heads | {"ours_loss": "ours, loss"}),
        count=derived(len(rows), "counted", "", 0),
        absent=derived(len(transformers_llama.VARIANTS) - len(every), "counted", "", 0),
        fastest=fastest["variant"],
        over_compiled=next(iter(compiled), lacking("a compiled variant", TIMES)),
        alike_liger=alike.get(LIGER_ALIKE, lacking("liger-kernel and compile with equal features", TIMES)),
        speedup=fastest["speedup"],
        loss=Number(fastest["loss"], decimals=3),
        ours_loss=Number(fastest["ours_loss"], decimals=3),
    )
