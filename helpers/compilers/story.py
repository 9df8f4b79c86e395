"""The tables and sentences of chapter 7, made from the records."""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from helpers.lab.tables import groups, reached

from .backends import BACKENDS, COMPILE, EAGER, ONNX
from .semantics import OUTCOMES, SILENT

GOAL_INFERENCE, GOAL_TRAINING = 1.3, 1.25


def outcomes(semantics: pd.DataFrame) -> pd.DataFrame:
    """A row for each case and a column for each way: what came of it; a dash where a way has no version of it."""
    if not len(semantics):
        return semantics
    semantics = _first_device(semantics)
    table = semantics.pivot_table(index="case", columns="variant", values="outcome", aggfunc="first", sort=False)
    return table.reset_index()


def _first_device(semantics: pd.DataFrame) -> pd.DataFrame:
    """What a capture gets wrong doesn't depend on the device."""
    return semantics[semantics["gpu"] == semantics["gpu"].iloc[0]]


def outcome_counts(semantics: pd.DataFrame) -> pd.DataFrame:
    """How often each way came to each outcome."""
    if not len(semantics):
        return semantics
    semantics = _first_device(semantics)
    counts = semantics.groupby(["variant", "outcome"], sort=False).size().unstack(fill_value=0)
    return counts.reindex(columns=list(OUTCOMES), fill_value=0).reset_index()


def semantic_verdicts(semantics: pd.DataFrame) -> list[str]:
    """Which ways are silently wrong, and about what."""
    if not len(semantics):
        return ["What each way gets wrong has not been looked at yet."]
    said = []
    for way, found in _first_device(semantics).groupby("variant", sort=False):
        wrong = found[found["outcome"] == SILENT]["case"].tolist()
        told = f"silently wrong about {', '.join(wrong)}" if wrong else "never silently wrong"
        said.append(f"`{way}`: {told}")
    return said


def refusals(semantics: pd.DataFrame, case: str) -> pd.DataFrame:
    """What each way said of one case."""
    if not len(semantics):
        return semantics
    rows = _first_device(semantics)
    rows = rows[rows["case"] == case]
    return rows[["variant", "outcome", "graphs", "breaks", "message", "line"]]


def latency(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a shape together, and the backends in their order."""
    if not len(rows):
        return rows
    shape = [name for name in ("gpu", "model", "batch", "precision") if name in rows]
    # What training computes in is no part of its plan: a row that isn't measured yet doesn't say.
    place = rows.groupby([name for name in shape if rows[name].notna().all()], sort=False).ngroup()
    return rows.iloc[np.lexsort((ranks(rows["backend"]), place))].reset_index(drop=True)


def ranks(backends: Iterable[str]) -> list[int]:
    """The place of each backend among all."""
    order = {backend: place for place, backend in enumerate(BACKENDS)}
    return [order.get(backend, len(order)) for backend in backends]


def latency_verdicts(latency: pd.DataFrame) -> list[str]:
    """The fastest way of each model and batch against eager, and whether one reaches the goal."""
    said = []
    for keys, found in groups(latency, ["gpu", "model", "precision", "batch"]):
        others = found[found["backend"] != EAGER]
        if not len(others):
            continue
        best = others.loc[others["speedup"].idxmax()]
        told = f"{best['backend']} {best['speedup']:.2f}× ({best['speedup_p20']:.2f} to {best['speedup_p80']:.2f})"
        said.append(f"{keys['gpu']}, {keys['model']}, {keys['precision']}, batch {keys['batch']}: {told}")
    for gpu, rows in latency.groupby("gpu", sort=False) if len(latency) else []:
        means = _means(rows)
        if len(means):
            (model, way), best = means["mean"].idxmax(), means.loc[means["mean"].idxmax()]
            said.append(
                f"{gpu}: the better of ONNX Runtime and compile, fp32: {way} on {model}, mean over batches of "
                f"{best['batches']}, {best['mean']:.2f}× "
                f"({reached(best['mean'] >= GOAL_INFERENCE)}: at least {GOAL_INFERENCE})"
            )
    return said or ["Latency has not been measured yet."]


def _means(latency: pd.DataFrame) -> pd.DataFrame:
    """The speed-ups of ONNX Runtime and compile in fp32: means over the batches, two or more, that a way has."""
    rows = latency[(latency["precision"] == "fp32") & latency["backend"].str.startswith((ONNX, COMPILE))]
    found = rows.groupby(["model", "backend"])["speedup"].agg(["mean", "size"])
    batches = rows.groupby(["model", "backend"])["batch"].agg(lambda sizes: ", ".join(map(str, sorted(sizes))))
    return found.assign(batches=batches)[found["size"] > 1]


def inference_gain(latency: pd.DataFrame) -> float | None:
    """The larger of them."""
    means = _means(latency)
    return float(means["mean"].max()) if len(means) else None


def flawed_verdicts(flawed: pd.DataFrame) -> list[str]:
    """What the lecture's timing says of a way, and what is true."""
    said = []
    for row in flawed.to_dict("records"):
        said.append(
            f"{row['gpu']}, {row['model']}, {row['backend']}: {row['flawed_speedup']:.2f}× by the lecture's timing, "
            f"{row['speedup']:.2f}× by the right one"
        )
    return said or ["The lecture's timing has not been repeated yet."]


def training_verdicts(training: pd.DataFrame) -> list[str]:
    """What compiling brings in training; the goal is of a GPU."""
    said = []
    for keys, found in groups(training, ["gpu", "model", "batch"]):
        told = ", ".join(
            f"{row['backend']} {row['speedup']:.2f}×" for row in found.to_dict("records") if row["backend"] != EAGER
        )
        said.append(f"{keys['gpu']}, {keys['model']}, batch {keys['batch']}: {told}")
    gain = training_gain(training)
    if gain is not None:
        said.append(
            f"torch.compile in training on a GPU, the best of modes and models: {gain:.2f}× "
            f"({reached(gain >= GOAL_TRAINING)}: at least {GOAL_TRAINING})"
        )
    return said or ["Training has not been measured yet."]


def training_gain(training: pd.DataFrame) -> float | None:
    """The best of torch.compile's modes in training on a GPU."""
    if not len(training):
        return None
    rows = training[training["backend"].str.startswith(COMPILE) & ~training["gpu"].str.startswith("CPU")]
    return rows["speedup"].max() if len(rows) else None


def headlines(semantics: pd.DataFrame, latency: pd.DataFrame, fusion: pd.DataFrame) -> list[str]:
    """An answer to each of the chapter's questions."""
    said = semantic_verdicts(semantics)
    if len(semantics):
        counts = outcome_counts(semantics).set_index("variant")
        worst = counts[SILENT].idxmax()
        none = counts.index[counts[SILENT] == 0].tolist()
        said = [
            f"Of {int(counts.iloc[0].sum())} functions `{worst}` is silently wrong about {counts.loc[worst, SILENT]}; "
            f"never so: {', '.join(f'`{way}`' for way in none) or 'no way'}"
        ]
    large = fusion[fusion["size"] == fusion["size"].max()] if len(fusion) else fusion
    for keys, found in groups(large[large["variant"] == "torch.compile"] if len(large) else large, ["gpu"]):
        faster = (1 / found["ratio"]).sort_values()
        said.append(
            f"{keys['gpu']}: fusing by torch.compile, at the larger size, makes {(faster > 1.03).sum()} of "
            f"{len(found)} cases faster, the median {faster.median():.2f}× as fast, the worst {faster.iloc[0]:.2f}×"
        )
    return said + latency_verdicts(latency)[-1:]


def fusion_verdicts(fusion: pd.DataFrame) -> list[str]:
    """Kernels and bytes before and after, of the larger size."""
    said = []
    large = fusion[fusion["size"] == fusion["size"].max()] if len(fusion) else fusion
    for keys, found in groups(large, ["gpu", "case"]):
        by = found.set_index("variant")
        if not {EAGER, "torch.compile"} <= set(by.index):
            continue
        before, after = by.loc[EAGER], by.loc["torch.compile"]
        said.append(
            f"{keys['gpu']}, {keys['case']} ({before['kind']}): {before['kernels']:.0f} → {after['kernels']:.0f} "
            f"kernels, {before['bytes_moved'] / before['bytes_least']:.1f} → "
            f"{after['bytes_moved'] / after['bytes_least']:.1f} times the least bytes, "
            f"{1 / after['ratio']:.2f}× as fast"
        )
    return said or ["Fusion has not been measured yet."]
