"""What `dlspeed try` measures from outside, beside the same change made by hand in the script.

Scripts are those of the open loops whose fault a change or a probe takes away, and chapter 3's two slow loops, in which
several do.
"""

import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from ... import training
from ...book import Worth
from ...book.table import table
from ...book.values import share_of
from ...faults import entries, planted_by
from ...lab.rows import Row
from ...trying import try_edited, try_script
from ...trying.answer import Tried
from ..profiling.planted_faults import NAMES
from .cases import LOOPS, counted, interval, percents, shares_of
from .loops import loops

_TRIED = (
    "many_parameters anomaly_mode slow_reads tokenise figure_each_step logs_everything collects_garbage "
    "evaluate_often checkpoint_each_step"
)
CHANGES = {loop: entries()[planted_by(loop)[0]].tried[0] for loop in _TRIED.split()} | {"tokenise": "same-batch"}
# The same change in the text, where `--fixed` does something else: it draws each 500th figure, say, and not none.
WORKERS = {"num_workers": min(4, len(os.sched_getaffinity(0))), "persistent_workers": True}
SHUFFLED = "DataLoader(Lines(), batch_size=32, shuffle=True)"
EDITS = {
    "slow_reads": ("else {}", f"else {WORKERS}"),
    "tokenise": (SHUFFLED, f"[next(iter({SHUFFLED}))] * 64"),
    "figure_each_step": ('fig.savefig(folder + "/loss.png")', "pass"),
    "logs_everything": ('log.info("step %d %s %s", step, name, row[:8])', "pass"),
    "evaluate_often": ("            accuracy(model, held_out)", "            pass"),
    "checkpoint_each_step": ("torch.save(state, path)", "pass"),
}
BY_HAND = {
    "vit": ("bf16", "fused_optimizer", "set_to_none", "workers"),
    "gpt": ("bf16", "fused_optimizer", "set_to_none"),
}
PACKAGE = Path(training.__file__).parents[1]
SECONDS = {"loop": 8.0, "pipeline": 150.0, "by hand": 24.0}
# Chapter 3's loops as a user has them: the package that holds them lies beside the script.
SLOW_LOOP = """
import sys
from package.pictures import local_photos
from package.text import local_wikitext
from package.training.switched import CLOTHES, LANGUAGE
pipeline, *fixes = sys.argv[1:]
switched, path = {"vit": (CLOTHES, local_photos()), "gpt": (LANGUAGE, local_wikitext())}[pipeline]
switched.run(frozenset(fixes), preset="cpu", path=path, epochs=1000)
"""


@table(
    small=[{"script": "anomaly_mode"}],
    cpu=[{"script": name} for name in (*CHANGES, *BY_HAND)],
    gpu=[],
    columns="change kind tried? tried_low? tried_high? verdict losses by_hand? by_hand_low? by_hand_high?",
    version=3,
    timed=False,
    worth=Worth(10, "what `try` finds", cpu=51.6),
)
def tried(script: str) -> Row:
    """The share of a step's time that goes by a change from outside, and by the same change in the script."""
    with tempfile.TemporaryDirectory() as folder:
        if script in CHANGES:
            path = LOOPS / f"{script}.py"
            (outside,) = try_script(path, seconds=SECONDS["loop"], only=[CHANGES[script]]).tried
            (hand,) = try_edited(path, [], *_edited(path, Path(folder)), seconds=SECONDS["loop"]).tried
            return _row(CHANGES[script], outside, hand)
        path = Path(folder) / "slow.py"
        path.write_text(SLOW_LOOP)
        shutil.copytree(PACKAGE, path.with_name("package"), ignore=shutil.ignore_patterns("__pycache__"))
        result = try_script(path, [script], seconds=SECONDS["pipeline"])
        (hand,) = try_edited(path, [script], path, [script, *BY_HAND[script]], seconds=SECONDS["by hand"]).tried
    outside = result.together or Tried("", "change", gain_share=0.0, verdict="nothing helped")
    return _row(" + ".join(result.kept) or "nothing", outside, hand)


def _edited(script: Path, folder: Path) -> tuple[Path, list[str]]:
    """The script with the same change in its text, and the arguments that it is run with."""
    if script.stem not in EDITS:
        return script, ["--fixed"]
    old, new = EDITS[script.stem]
    source = script.read_text()
    if source.count(old) != 1:
        raise ValueError(f"{script.name} has {source.count(old)} times: {old}")
    edited = folder / script.name
    edited.write_text(source.replace(old, new))
    return edited, []


def _row(change: str, tried: Tried, hand: Tried) -> Row:
    row = {"change": change, "kind": tried.kind, "verdict": tried.verdict, "losses": tried.losses or tried.reason}
    return row | interval("tried", tried) | interval("by_hand", hand)


# Numbers

MATCH = 0.03  # of a step: a change from outside that is this near to the one by hand agrees with it


@tried.numbers(needs=[loops])
def _(rows: pd.DataFrame, loops: pd.DataFrame) -> SimpleNamespace:
    """What a change did from outside, beside what `profile` promised for its fault and what the edit by hand does."""
    both = rows.merge(loops[["loop", "promised"]].rename(columns={"loop": "script"}), how="left", on="script")
    shares = {name: shares_of(both, name) for name in ("tried", "by_hand")}
    shown = both.assign(promised=percents(both["promised"]), **shares)
    heads = {"script": "script", "change": "change", "promised": "promised", "tried": "tried from outside"}
    heads |= {"by_hand": "by hand", "losses": "losses"}
    one = both[~both["script"].isin(NAMES)].dropna(subset=["tried", "by_hand"])
    low, high = ((one[f"tried_{end}"].fillna(one["tried"])) for end in ("low", "high"))
    equal = (one["by_hand_high"] >= low - MATCH) & (one["by_hand_low"] <= high + MATCH)
    return SimpleNamespace(
        table=shown[list(heads)].rename(columns=heads),
        equal=counted(equal.sum()),
        count=counted(len(one)),
        share=share_of(equal.sum(), len(one)),
    )
