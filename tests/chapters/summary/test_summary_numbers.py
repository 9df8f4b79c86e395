"""What each change is worth, over all settings."""

from types import SimpleNamespace

import pandas as pd

from helpers.book.values import TIMES, Number, cost, lacking
from helpers.chapters import summary
from helpers.chapters.summary import changes
from helpers.chapters.summary.machines import described, not_measured


def test_changes_are_ordered_by_class_and_gain_and_counted():
    llama = {"compile": Number(1.2, TIMES, 1.1, 1.3, 9), "fused_adamw": Number(1.01, TIMES, 0.985, 1.036, 9)}
    llama["small"] = Number(1.03, TIMES, 1.01, 1.05, 9)  # whose interval leaves 1 out
    vit = {"compile": Number(2.0, TIMES), "set_to_none": Number(1.05, TIMES), "flash": lacking("flash", TIMES)}
    worth = changes.worth({"Llama": llama, "ViT": vit})
    effects, others = (
        ["compile (ViT)", "compile (Llama)", "small (Llama)"],
        ["fused adamw (Llama)", "set to none (ViT)"],
    )
    assert list(worth.gains) == effects + others
    assert worth.largest == "compile (ViT)" and (worth.effects, worth.nones, worth.undecideds) == (3, 1, 1)


def test_actions_tell_gain_and_cost_by_device_and_a_gain_without_effect_by_what_is_excluded():
    losses = pd.DataFrame({"step": ["plain", "fused"], "peak_gib": [8.0, 2.0], "loss": [3.0, 3.1]})
    costs = cost(losses, "step", "fused", "plain")
    here = SimpleNamespace(fused=Number(1.01, TIMES, 0.985, 1.036, 9), cost=cost(losses, "step", "no such", None))
    there = SimpleNamespace(fused=Number(1.6, TIMES, 1.5, 1.7, 9), cost=costs)
    table = SimpleNamespace(on={"cpu": here, "gpu": there}.__getitem__)
    here.measured = there.measured = True
    [row] = changes.actions([("4. fuse", table, "fused", table, "cost")], "gpu", "cpu").to_dict("records")
    told = {"speedup, GPU": "1.60× (1.50 to 1.70)", "speedup, CPU": "≤ 4.8 %"}
    assert row == {"change": "4. fuse"} | told | {"memory, GPU": "0.25×", "loss, GPU": "+0.10"}


def test_stages_are_compared_seed_by_seed():
    row = {"way": "cumulative", "real_tokens_per_s": 1.0, "step_ms": 1.0, "peak_gib": 1.0, "validation_loss": 5.0}
    row |= {"validation_accuracy": 0.2, "constant_accuracy": 0.1, "real_tokens": 9, "steps": 3}
    times = {"none": (8.0, 12.0), "mixed precision": (4.0, 6.1), "compile": (2.0, None)}
    rows = [
        row | {"stage": stage, "seed": seed, "train_s": time}
        for stage, of_seeds in times.items()
        for seed, time in enumerate(of_seeds)
        if time
    ]
    third = {"seed": 2, "train_s": 9.0}
    worse = [rows[0] | third, rows[0] | third | {"stage": "mixed precision", "validation_loss": 5.1}]
    named = summary.stages.of_rows(pd.DataFrame(rows), pd.DataFrame())
    assert named.largest.stage == "mixed precision" and f"{named.all}" == "1.98× (1.79 to 2.2, 2 pairs)"
    assert named.compiled.compiling_s.value == -2.0
    assert named.reached and not summary.stages.of_rows(pd.DataFrame(rows + worse), pd.DataFrame()).reached
    assert f"{named.proven['mixed precision']}" == f"{named.gains['mixed precision']}"
    steps = pd.DataFrame([{"stage": "mixed precision", "ratio": 0.5, "low": 0.4, "high": 0.625, "pairs": 8}])
    assert (
        f"{summary.stages.of_rows(pd.DataFrame(rows), steps).proven['mixed precision']}"
        == "2.0× (1.60 to 2.5, 8 pairs)"
    )


def test_rows_without_figures_are_listed_by_reason():
    rows = pd.DataFrame(
        {"variant": ["ours", "apex", "ffcv"], "status": ["ok", "not installed: apex", "not installed: ffcv"]}
    )
    found = not_measured({"rush/norms": rows, "rush/pairs": pd.DataFrame()})
    assert found["rows"].tolist() == ["all", "apex", "ffcv"]
    assert found["reason"].tolist()[1] == "not installed: apex"


def test_changes_that_differ_between_a_gpu_and_the_cpu_are_named():
    faster, slower, null = (Number(x, TIMES, x / 1.05, x * 1.05, 20) for x in (1.5, 0.7, 1.01))
    gpu = {"ViT": {"bf16": faster, "workers": null, "width_256": faster, "flash": faster, "alone": faster}}
    cpu = {"ViT": {"bf16": slower, "workers": null, "width_256": faster, "flash": null}}
    both = changes.on_both(gpu, cpu)
    assert both.table["change"].tolist() == ["bf16", "flash"]
    assert (both.same, both.count) == (2, 4)


def test_the_machines_that_are_shown_are_described_in_their_order():
    row = {"torch": "2.13.0", "first_date": "2026-01-02", "last_date": "2026-01-03"}
    known = pd.DataFrame([row | {"gpu": "CPU A"}, row | {"gpu": "NVIDIA B", "last_date": "2026-01-02"}])
    one, two = "NVIDIA B (torch 2.13.0, 2026-01-02)", "CPU A (torch 2.13.0, 2026-01-02 to 2026-01-03)"
    assert described(known, "nvidia-b", "cpu-a") == f"{one}; {two}" and described(known, "cpu-a") == two
