"""What a diagnosis finds in the two slow loops, and in the fixed ones."""

from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from ...book.table import Worth, table
from ...book.values import TIMES, Number, derived, told
from ...findings.diagnose import diagnose as read_diagnosis
from ...findings.summary import LEAST
from ...lab import Row
from .fixes import SAME
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
    """The findings of the slow loops, the largest estimate first, and how many there are in each loop."""
    counts = rows.groupby(["pipeline", "variant"])["finding"].agg(lambda names: (names != "nothing").sum())
    of = {key: derived(count, "counted findings", "", 0) for key, count in counts.items()}
    slow = rows[(rows["variant"] == SLOW) & (rows["finding"] != "nothing")].fillna({"where": ""})
    slow = slow.sort_values(["pipeline", "gain_ms"], ascending=[False, False])
    commits = ", ".join(rows["commit"].unique())
    return SimpleNamespace(slow=slow, commit=commits, vit=by_variant(of, "vit"), gpt=by_variant(of, "gpt"))


# The fix that does what a finding advises; of several sizes the width.
REPAIRS = {
    "waiting for the loader": "workers",
    "fp32 products": "bf16",
    "unaligned sizes": "width_",
    "unfused elementwise operations": "fused_loss",
    "attention from matmul and softmax": "fused_attention",
    "separate projections of one input": "fused_qkv",
    "unfused optimizer": "fused_optimizer",
    "gradients zeroed, not dropped": "set_to_none",
    "result never used": "no_dead_projection",
    "repeated constant work": "positions_once",
}


def beside(slow: pd.DataFrame, **fixes: dict[str, Number]) -> pd.DataFrame:
    """Each finding of a slow loop, its estimate, and what the fix that it advises gained there, both as speedups."""
    lines = []
    for row in slow.to_dict("records"):
        alone = fixes[row["pipeline"]]
        repair = REPAIRS.get(row["finding"])
        fix = next((name for name in alone if repair and name.startswith(repair)), None)
        lines.append(
            {
                "model": NAMES[row["pipeline"]],
                "finding": row["finding"],
                "source line": row["where"].split(" in ")[0].split("/")[-1],
                "estimate": f"{1 / (1 - row['gain_share']):.2f}{TIMES}",
                "fix": fix or "–",
                "measured": told(alone[fix], SAME) if fix else "–",
            }
        )
    return pd.DataFrame(lines)
