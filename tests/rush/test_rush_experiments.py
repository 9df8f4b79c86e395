"""Chapter 5's experiments on the small preset, and what is said of their records."""

import fake_records
import pandas as pd
import pytest

from helpers.experiments import rush as experiments
from helpers.experiments import tables_of
from helpers.lab import records
from helpers.rush import LADDER, fused_norms, measurement, plots, story

ROW = ("tokens_per_s", "step_ms", "p20_ms", "p80_ms", "peak_gib", "mfu", "matmul_share", "compile_s", "loss")


@pytest.fixture
def recorded(tmp_path):
    fake_records.write(tmp_path)
    return lambda e: records.read("nvidia-test", "rush", e.table, tmp_path)


@pytest.mark.parametrize("name", ["ladder", "batch", "checkpointing", "peers"])
def test_setups_are_measured_or_say_why_not(name):
    rows = getattr(experiments, name)("small")
    ran = rows[rows["status"] == "ok"]
    assert len(ran)
    assert ran["tokens_per_s"].gt(0).all() and ran["loss"].between(1, 10).all()
    assert rows.loc[rows["status"] != "ok", "status"].str.startswith("not here: ").all()


def test_what_takes_seconds_is_measured_before_the_ladder():
    order = [e.table for e in tables_of("rush")]
    quick = ["norms", "adam", "lecture", "memory_alone"]
    assert order[: order.index("ladder")] == quick


def test_no_setup_is_measured_in_two_tables(monkeypatch):
    asked = []
    monkeypatch.setattr(experiments, "_run", lambda setup, **steps: asked.append(setup) or {})
    for e in (experiments.ladder, experiments.batch, experiments.checkpointing):
        for config in e.configurations("big-gpu"):
            e.measure(**config)
    twice = {setup for setup in asked if asked.count(setup) > 1}
    assert twice == {LADDER["chunked cross-entropy"]}  # where the lengths of checkpointing begin


def test_one_rung_is_tuned_and_none_stands_on_it():
    assert [step for step, setup in LADDER.items() if setup.compile == "max-autotune"] == ["max-autotune"]


def test_a_loader_is_waited_for_and_its_copies_apart():
    (row,) = experiments.loading("small").to_dict("records")
    assert row["step_ms"] > 0 and row["wait_ms"] > 0 and row["copy_ms"] >= 0
    assert row["wait_ms"] < row["epoch_s"] * 1e3


def test_all_that_is_compiled_or_captured_is_so_before_there_is_a_loader(monkeypatch):
    steps, when = [], []
    step, load = measurement.Trainer.step, measurement.DataLoader
    monkeypatch.setattr(measurement.Trainer, "step", lambda *given: steps.append(1) or step(*given))
    monkeypatch.setattr(measurement, "DataLoader", lambda *given, **how: when.append(len(steps)) or load(*given, **how))
    experiments.loading("small")
    assert when == [measurement.BEFORE_CAPTURE + 1]
    assert len(steps) == when[0] + 8


@pytest.mark.parametrize("name", ["norms", "adam"])
def test_the_host_queues_ahead_of_each_timed_kernel(name, monkeypatch):
    befores = []
    compare = experiments.compare
    monkeypatch.setattr(
        experiments, "compare", lambda variants, **how: befores.append(how.get("before")) or compare(variants, **how)
    )
    e = getattr(experiments, name)
    e.measure(**e.configurations("small")[0])
    assert befores == [experiments.queue_ahead]


def test_each_norm_is_made_once_and_weighed_as_it_was_timed(monkeypatch):
    made = []
    norm = fused_norms.norm
    monkeypatch.setattr(fused_norms, "norm", lambda variant, kind: made.append(variant) or norm(variant, kind))
    rows = experiments.norms.rows(experiments.norms.configurations("small")[0])
    ran = [row["variant"] for row in rows if row["status"] == "ok"]
    assert sorted(made) == sorted(ran)
    assert all(row["peak_gib"] > 0 for row in rows if row["status"] == "ok")


@pytest.mark.parametrize("name", ["norms", "adam", "lecture"])
def test_kernels_are_compared_and_those_that_lack_something_say_so(name):
    rows = getattr(experiments, name)("small")
    assert rows.loc[rows["status"] == "ok", "median_ms"].gt(0).all()
    assert rows.loc[rows["status"] != "ok", "status"].str.match("not installed: |not here: ").all()


def test_every_strategy_ends_at_the_same_loss():
    rows = experiments.distributed("small").set_index("strategy")
    assert set(rows.index) == set(experiments.STRATEGIES)
    assert rows["last_loss"].max() - rows["last_loss"].min() < 1e-4
    assert rows.loc["zero3", "optimizer_bytes"] < 0.6 * rows.loc["ddp", "optimizer_bytes"]


def test_simulated_memory_is_told_beside_the_derived():
    (row,) = experiments.memory_plan("small").to_dict("records")
    assert row["simulated"]
    assert row["derived_ratio"] == pytest.approx(1, abs=0.03)


def test_scaling_is_predicted_for_each_strategy():
    rows = experiments.scaling("small")
    assert rows["predicted"].all()
    assert rows["efficiency"].between(0, 1).all()
    assert set(rows["strategy"]) == {"ddp", "zero2", "zero3"}


def test_rungs_are_told_against_what_they_stand_on(recorded):
    steps = story.ladder(recorded(experiments.ladder)).set_index("step")
    assert steps.loc["TF32", "gain"] == pytest.approx(2.0)
    assert steps.loc["mixed precision", "gain in all"] == pytest.approx(3.0)
    assert steps.loc["no optimisation", "gain"] is None or pd.isna(steps.loc["no optimisation", "gain"])
    assert set(story.changes()["step"]) == set(steps.index) - {"no optimisation"}


def test_goals_are_held_against_the_records(recorded):
    sentences = " ".join(story.ladder_verdicts(recorded(experiments.ladder), recorded(experiments.peers)))
    assert "best bf16 rung, Triton SwiGLU" in sentences and "MFU (reached: at least 60%)" in sentences
    assert "2.00× transformers, liger-kernel, FlashAttention-2, fused AdamW (reached: at least 1.5)" in sentences
    sentences = story.kernel_verdicts(recorded(experiments.norms), recorded(experiments.adam))
    assert (
        "NVIDIA Test: our norm kernel moves its bytes at 70% of a copy's rate or more (reached: at least 65%)"
        in sentences
    )
    sentences = story.simulation_verdicts(recorded(experiments.memory_plan))
    assert "the derived memory is within 1.00% of the measured one (reached: at most 3%)" in sentences[0]
    empty = pd.DataFrame()
    assert len(story.simulation_verdicts(empty)) == 1
    assert len(story.ladder_verdicts(empty, empty)) == len(story.kernel_verdicts(empty, empty)) == 1


def test_a_rung_that_this_torch_has_not_leaves_the_others_as_they_are(recorded):
    rows = recorded(experiments.ladder)
    whole = story.ladder(rows).set_index("step")
    lacking = rows["step"] == "F.linear_cross_entropy"
    rows.loc[lacking, "status"] = "not here: F.linear_cross_entropy isn't in torch 2.11.0"
    rows.loc[lacking, ["tokens_per_s", "mfu", "matmul_share", "peak_gib", "compile_s", "loss"]] = None
    steps = story.ladder(rows).set_index("step")
    assert pd.isna(steps.loc["F.linear_cross_entropy", "gain"])
    others = whole.index.drop("F.linear_cross_entropy")
    assert steps.loc[others, "gain"].equals(whole.loc[others, "gain"])
    nothing = pd.DataFrame()
    assert story.ladder_verdicts(rows[~lacking], nothing) == story.ladder_verdicts(rows, nothing)
    assert len(plots.ladder(steps.reset_index()).axes[0].patches) == len(others)


@pytest.mark.parametrize(("missing", "untold"), [("no optimisation", "the start"), ("batch 16", "float8")])
def test_nothing_is_said_against_a_rung_that_did_not_run(missing, untold, tmp_path):
    rows = _rewritten(tmp_path, experiments.ladder, "step", {missing: "out of memory"})
    sentences = story.ladder_verdicts(rows[rows["status"] == "ok"], pd.DataFrame())
    assert "best bf16 rung, Triton SwiGLU" in sentences[0]
    assert not any(untold in sentence or "nan" in sentence for sentence in sentences)


def test_the_verdict_says_which_peer_it_is_against_and_which_ran_out_of_memory(tmp_path):
    full = "out of memory"
    rows = _rewritten(tmp_path, experiments.peers, "variant", {"transformers": full, "transformers, fused AdamW": full})
    sentences = story.peer_verdicts(rows)
    failed = "out of memory at the same batch: transformers; transformers, fused AdamW"
    assert sentences == [f"NVIDIA Test: 2.00× {story.LIGER} (reached: at least 1.5); {failed}"]


def test_without_the_peer_of_the_goal_it_is_the_fastest_that_ran(tmp_path):
    fastest = {"transformers, fused AdamW": {"tokens_per_s": 48000.0}}
    rows = _rewritten(tmp_path, experiments.peers, "variant", {story.LIGER: "not installed: flash_attn"}, fastest)
    (sentences,) = story.peer_verdicts(rows)
    assert "1.25× transformers, fused AdamW (missed: at least 1.5), the fastest of the others that ran" in sentences


def test_a_peer_table_in_which_nothing_ran_says_nothing():
    rows = pd.DataFrame(
        {"gpu": ["NVIDIA Test"] * 2, "variant": ["ours", "transformers"], "status": ["out of memory"] * 2}
    )
    assert story.peer_verdicts(rows) == []


def _rewritten(folder, e, column, statuses, figures=None):
    """The rows of a table, in which some of them did not run, or have other figures; its file says the same."""
    fake_records.write(folder)
    path = records.path("nvidia-test", "rush", e.table, folder)
    rows = records.read_rows(path)
    for row in rows:
        if row[column] in statuses:
            row |= {name: "" for name in ROW} | {"status": statuses[row[column]]}
        row |= {name: str(value) for name, value in (figures or {}).get(row[column], {}).items()}
    records.rewrite(path, rows)
    return records.read("nvidia-test", "rush", e.table, folder)


def test_batches_are_those_of_the_rungs_and_those_measured_beside_them(recorded):
    steps = story.batches(recorded(experiments.ladder), recorded(experiments.batch))
    assert list(steps["batch"]) == [1, 2, 4, 8, 16, 32]
    assert steps["tokens_per_s"].notna().all()
    assert len(plots.batches(steps).axes[0].lines[0].get_xdata()) == 6
    assert list(story.batches(recorded(experiments.ladder), pd.DataFrame())["batch"]) == [1, 2, 4, 8, 16]
    assert list(story.batches(pd.DataFrame(), recorded(experiments.batch))["batch"]) == [32]


def test_the_longest_sequence_is_that_of_the_last_row_that_fits(recorded):
    rows = recorded(experiments.checkpointing)
    rows.loc[rows["sequence"] > 8192, "status"] = "out of memory"
    assert set(story.longest(rows)["sequence"]) == {8192}


def test_losses_are_compared_with_one_process(recorded):
    rows = recorded(experiments.distributed)
    assert "is other, to the six digits recorded, than one rank's" in story.same_losses(rows)[0]
    rows.loc[rows["strategy"] == "tp", "last_loss"] = 5.6
    assert story.same_losses(rows) == [
        "NVIDIA Test: on 2 and 4 ranks no strategy's last loss is further than 1.0e-01 from one rank's"
    ]


def test_the_figures_can_be_drawn(recorded):
    assert plots.ladder(story.ladder(recorded(experiments.ladder))).axes
    assert plots.batches(recorded(experiments.batch)).axes
    assert plots.checkpointing(recorded(experiments.checkpointing)).axes
    assert plots.memory(recorded(experiments.memory_plan)).axes
    assert plots.scaling(recorded(experiments.scaling)).axes
