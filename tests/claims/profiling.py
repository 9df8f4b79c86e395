"""Chapter 3."""

from . import claim

PIPELINES = {"ViT on photos": "vit", "language model": "gpt"}
LAST_FIX = {"vit": "photos_on_device", "gpt": "any_algorithm"}  # what comes after is optional
NAMES = "|".join(PIPELINES)


@claim("{gpu}, {name}, {variant}: forward {forward} ms, backward {backward} ms, {ratio} times forward", name=NAMES)
def _(records, gpu, name, variant, **_):
    rows = records.rows("profiling/modules", gpu=gpu, pipeline=PIPELINES[name], variant=variant)
    whole = rows[rows["type"].notna() & ~rows["module"].str.contains(".", regex=False)].iloc[0]
    forward, backward = whole["forward_ms"], whole["backward_ms"]
    return {"forward": forward, "backward": backward, "ratio": backward / forward}


@claim(
    "{gpu}, {name}: an epoch {gain}× as fast ({verdict}: at least {goal}), accuracy {more} "
    "({same}: no lower, within a deviation of the seeds)",
    name=NAMES,
)
def _(records, gpu, name, **_):
    rows = records.rows("profiling/whole_runs", gpu=gpu, pipeline=PIPELINES[name])
    slow, fixed = (rows[rows["variant"] == variant] for variant in ("slow", "fixed"))
    gain, goal = slow["epoch_s"].mean() / fixed["epoch_s"].mean(), {"vit": 5, "gpt": 3}[PIPELINES[name]]
    more = fixed["validation_accuracy"].mean() - slow["validation_accuracy"].mean()
    told = {"gain": gain, "goal": goal, "verdict": gain >= goal, "more": more}
    return told | {"same": more >= -slow["validation_accuracy"].std(ddof=1)}


@claim("{gpu}, {name}, all fixes: the device is idle for {idle} of a step ({verdict}: below 5%)", name=NAMES)
def _(records, gpu, name, **_):
    pipeline = PIPELINES[name]
    last = records.one(f"profiling/{pipeline}_fixes", gpu=gpu, variant="cumulative", fix=LAST_FIX[pipeline])
    idle = last["device_idle_share"]
    return {"idle": idle, "verdict": idle < 0.05}


@claim(
    "{gpu}, {variant}: {first} ms a step at first, {last} ms at last",
    variant="collected on the CPU|streaming on the device",
)
def _(records, gpu, variant, **_):
    ms = records.rows("profiling/metrics_cost", gpu=gpu, variant=variant).sort_values("step")["ms"].to_list()
    tenth = max(len(ms) // 10, 1)
    return {"first": _median(ms[:tenth]), "last": _median(ms[-tenth:])}


def _median(values: list[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2
