"""What each change is worth, over all settings."""

from types import SimpleNamespace

import pandas as pd

from helpers.book.values import TIMES, Number, cost
from helpers.chapters import summary
from helpers.chapters.summary import changes
from helpers.chapters.summary.machines import described, not_measured


def test_actions_tell_gain_and_cost_by_device_and_a_gain_without_effect_by_what_is_excluded():
    losses = pd.DataFrame({"step": ["plain", "fused"], "peak_gib": [8.0, 2.0], "loss": [3.0, 3.1]})
    costs = cost(losses, "step", "fused", "plain")
    here = SimpleNamespace(fused=Number(1.01, TIMES, 0.985, 1.036, 9), cost=cost(losses, "step", "no such", None))
    there = SimpleNamespace(fused=Number(1.6, TIMES, 1.5, 1.7, 9), cost=costs)
    table = SimpleNamespace(on={"cpu": here, "gpu": there}.__getitem__)
    here.measured = there.measured = True
    [row] = changes.actions([("4. fuse", "none", table, "fused", table, "cost")], "gpu", "cpu").to_dict("records")
    told = {"speedup, GPU": "1.60× (1.50 to 1.70)", "speedup, CPU": "≤ 4.8 %"}
    assert row == {"change": "4. fuse", "over": "none"} | told | {"memory, GPU": "0.25×", "loss, GPU": "+0.10"}


def test_stages_are_compared_seed_by_seed():
    row = {
        "way": "cumulative",
        "preset": "cpu",
        "real_tokens_per_s": 1.0,
        "step_ms": 1.0,
        "peak_gib": 1.0,
        "validation_loss": 5.0,
    }
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
    named = summary.stages.of_rows(pd.DataFrame(rows))
    assert f"{named.all}" == "1.98× (1.79 to 2.2, 2 pairs)"
    assert named.compiled.compiling_s.value == -2.0
    assert named.reached and not summary.stages.of_rows(pd.DataFrame(rows + worse)).reached


def test_tables_without_a_record_are_listed_with_their_question(monkeypatch, tmp_path):
    monkeypatch.setenv("HELPERS_RESULTS", str(tmp_path))
    absent = not_measured("some-gpu", "some-cpu").set_index(["table", "on"])["question"]
    assert absent["rush/without", "GPU"] == "what the best setup loses without each change"
    assert ("pipelines/formats", "CPU") in absent and ("pipelines/formats", "GPU") not in absent


def test_the_machines_that_are_shown_are_described_in_their_order():
    row = {"torch": "2.13.0", "first_date": "2026-01-02", "last_date": "2026-01-03"}
    known = pd.DataFrame([row | {"gpu": "CPU A"}, row | {"gpu": "NVIDIA B", "last_date": "2026-01-02"}])
    one, two = "NVIDIA B (torch 2.13.0, 2026-01-02)", "CPU A (torch 2.13.0, 2026-01-02 to 2026-01-03)"
    assert described(known, "nvidia-b", "cpu-a") == f"{one}; {two}" and described(known, "cpu-a") == two
