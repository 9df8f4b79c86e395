"""What a diagnosis finds in the two slow loops, and in the fixed ones."""

from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from ...book.table import Worth, table
from ...book.values import derived
from ...findings.diagnose import diagnose as read_diagnosis
from ...findings.summary import LEAST
from ...lab import Row
from .planted_faults import LOOPS, NAMES, PIPELINES, SIZES, SLOW, by_variant, fixes_of, sized, trace_of


@table(
    **{name: sized(size, LOOPS[2:] if size == "small" else LOOPS) for name, size in SIZES.items()},
    version=2,
    columns="rank finding part? gain_ms? gain_share? where? evidence? advice? sure?",
    worth=Worth(20, "what a profile of a slow training shows", cpu=2.9, gpu=6, big_gpu=11),
)
def diagnose(size: str, pipeline: str, variant: str) -> list[Row]:
    """What a diagnosis finds in each pipeline, the largest gain first; in the fixed one from 1 % on."""
    trace = trace_of(PIPELINES[pipeline], fixes_of(pipeline, variant, size), size, detailed=True)
    findings = read_diagnosis(trace, least=0.0 if variant == SLOW else LEAST).table
    if not len(findings):
        return [{"rank": 0, "finding": "nothing"}]
    findings["where"] = findings["where"].str.replace(f"{Path(__file__).parents[2]}/", "", regex=False)
    findings = findings.drop(columns="option")  # a slow loop's is one more finding here
    rows = findings.astype(object).where(findings.notna(), None).to_dict("records")
    return [{"rank": rank} | row for rank, row in enumerate(rows)]


@diagnose.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """The largest findings of the slow loops, and how many there are in each loop."""
    slow = rows[rows["variant"] == "slow"].sort_values(["pipeline", "gain_ms"], ascending=[False, False])
    first = slow.groupby("pipeline", sort=False).head(3)
    largest = pd.DataFrame(
        {
            "model": first["pipeline"].map(NAMES),
            "finding": first["finding"],
            "source line": first["where"].fillna("").str.split(" in ").str[0].str.split("/").str[-1],
            "gain_ms": first["gain_ms"],
            "gain, % of step": (100 * first["gain_share"]).map("{:.1f}".format),
            "why it is slow": first["evidence"],
        }
    )
    counts = rows.groupby(["pipeline", "variant"])["finding"].agg(lambda names: (names != "nothing").sum())
    of = {key: derived(count, "counted findings", "", 0) for key, count in counts.items()}
    commits = ", ".join(rows["commit"].unique())
    return SimpleNamespace(largest=largest, commit=commits, vit=by_variant(of, "vit"), gpt=by_variant(of, "gpt"))
