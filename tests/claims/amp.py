"""Chapter 1."""

from . import Records, claim

NAMES = {
    "AMP fp16, no scaler": "amp",
    "AMP fp16, static scale": "static",
    "AMP fp16, dynamic scale": "dynamic",
    "AMP fp16, torch's scaler": "torch-scaler",
    "AMP bf16": "bf16",
    "pure fp16": "fp16",
}


def _accuracy(records: Records, gpu: str, precision: str):
    rows = records.rows("amp/quality", gpu=gpu, task="segmentation", precision=precision)
    return rows["validation_accuracy"]


@claim("{gpu}: segmentation with a {precision} scale, lowest of all seeds: {lowest} (at least 0.985: {verdict})")
def _(records, gpu, precision, **_):
    lowest = _accuracy(records, gpu, precision).min()
    return {"lowest": lowest, "verdict": lowest >= 0.985}


@claim("{gpu}: without a scaler, AMP is {less} below the dynamic scale, on the mean")
def _(records, gpu, **_):
    return {"less": _accuracy(records, gpu, "dynamic").mean() - _accuracy(records, gpu, "amp").mean()}


@claim("{gpu}: the dynamic scale is {more} from the static one, on the mean")
def _(records, gpu, **_):
    return {"more": _accuracy(records, gpu, "dynamic").mean() - _accuracy(records, gpu, "static").mean()}


@claim("{gpu}: diverged at least once: {names}")
def _(records, gpu, names):
    rows = records.rows("amp/quality", gpu=gpu, diverged="yes")
    known = {precision: name for name, precision in NAMES.items()}
    return {"names": ", ".join(known[precision] for precision in sorted(set(rows["precision"]))) or "none"}


@claim(
    "{gpu}: {name}, {apart} in accuracy against fp32 (seeds: {seeds}), {zero} of the gradients zero",
    name="|".join(NAMES),
)
def _(records, gpu, name, **_):
    rows = records.rows("amp/reduced_quality", gpu=gpu)
    fp32, runs = (rows[rows["precision"] == p].set_index("seed") for p in ("fp32", NAMES[name]))
    both = fp32.index.intersection(runs.index)
    apart = (runs.loc[both, "validation_accuracy"] - fp32.loc[both, "validation_accuracy"]).mean()
    return {"apart": apart, "seeds": len(both), "zero": runs["zero_share"].mean()}


@claim(
    "{gpu}, {millions} M parameters: unscale, clip and step {faster}× as fast as torch's ({verdict}: at least 1.3), "
    "{of_none} of the step without a scaler ({lean}: at most 1.02), {waits} waits for the GPU"
)
def _(records, gpu, millions, **_):
    rows = records.rows("amp/scaler_step", gpu=gpu, million_parameters=millions).set_index("variant")
    ours, torch_ = rows.loc["ours"], rows.loc["torch.amp.GradScaler"]
    faster = torch_["ratio_to_no_scaler"] / ours["ratio_to_no_scaler"]
    told = {"faster": faster, "verdict": faster >= 1.3, "of_none": ours["ratio_to_no_scaler"]}
    return told | {"lean": ours["ratio_to_no_scaler"] <= 1.02, "waits": ours["host_reads"]}


@claim("{gpu}, width {hidden}: a step under our Autocast takes {ratio} of one under torch's ({verdict}: at most 1.02)")
def _(records, gpu, hidden, **_):
    ratio = records.one("amp/autocast_overhead", gpu=gpu, hidden=hidden, variant="ours")["ratio_to_torch"]
    return {"ratio": ratio, "verdict": ratio <= 1.02}
