"""What each way to capture a function gets right, refuses or gets wrong."""

from types import SimpleNamespace

import pandas as pd

from ...book import Worth
from ...book.table import table
from ...book.values import Number, derived, lacking
from ...compilers import measure_semantics
from ...compilers.capture import VARIANTS
from ...compilers.capture_cases import CASES
from ...compilers.semantics import BREAKS, OUTCOMES, SILENT, WARNED
from ...lab.rows import Row

HEADS = {name: name for name in OUTCOMES} | {BREAKS: "graph break", WARNED: "wrong, warned", SILENT: "wrong, silent"}


@table(
    small=[{"case": "printing"}],
    cpu=[{"case": name} for name in CASES],
    gpu=[],
    version=2,
    columns="variant outcome",
    timed=False,
    worth=Worth(1, "what a compiler leaves as it is", cpu=0.6),
)
def semantics(case: str) -> list[Row]:
    """Outcome of capturing a function by each variant, and calling it along another path than its example's."""
    return [measure_semantics(case, variant) for variant in VARIANTS]


@semantics.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """How many functions each capture gets right, refuses or gets wrong, and which ones without a warning."""
    silent = rows[rows["outcome"] == SILENT].groupby("variant")["case"].agg(", ".join)
    outcomes = rows.groupby(["variant", "outcome"], sort=False).size().unstack(fill_value=0)
    outcomes = outcomes.reindex(columns=list(OUTCOMES), fill_value=0).rename(columns=HEADS)
    outcomes["silently wrong functions"] = silent

    def silently_wrong(variant: str) -> Number:
        if variant not in outcomes.index:
            return lacking(f"outcomes of {variant}")
        return derived(outcomes.loc[variant, "wrong, silent"], "counted", "", 0)

    return SimpleNamespace(
        outcomes=outcomes.rename_axis("capture").reset_index(),
        functions=derived(rows["case"].nunique(), "counted", "", 0),
        trace=silently_wrong("torch.jit.trace"),
        script=silently_wrong("torch.jit.script"),
        export=silently_wrong("torch.export"),
        dynamo=silently_wrong("Dynamo"),
        inductor=silently_wrong("torch.compile"),
    )
