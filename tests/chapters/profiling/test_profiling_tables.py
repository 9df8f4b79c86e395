"""Chapter 3's experiments on the small preset."""

import pytest

from helpers.chapters import profiling
from helpers.chapters.profiling import planted_faults as planting
from helpers.chapters.profiling.timeline import DRAWN
from helpers.training import CLOTHES


def test_modules_add_up_and_their_lower_bounds_are_known():
    rows = profiling.modules("small")
    for _, table in rows.groupby(["pipeline", "variant"]):
        step = table.loc[table["module"] == "step", "total_ms"].iloc[0]
        parts = table.loc[table["module"] != "step", "self_ms"].sum()
        assert parts == pytest.approx(step, rel=0.5)  # medians of parts: nearly, on a busy machine
        linear = table[table["type"] == "Linear"]
        assert linear["lower_bound_ms"].gt(0).all() and linear["gflop"].gt(0).all()


def test_fixes_are_timed_alone_and_together_beside_the_slow_loop():
    rows = profiling.gpt_fixes("small")
    assert rows["fix"].tolist()[-1] == "all" and len(rows) == 2
    assert rows["us_per_target"].gt(0).all() and rows["baseline"].eq("slow").all()


def test_a_cpu_is_not_asked_for_fixes_that_need_a_gpu():
    on_cpu = {row["fix"] for row in profiling.vit_fixes.configurations("cpu")}
    assert {"pinned", "cudnn_benchmark", "cuda_graph"}.isdisjoint(on_cpu)
    assert {"decode_once", "bf16", "fused_optimizer", "photos_on_device"} <= on_cpu
    on_gpu = {row["fix"] for row in profiling.vit_fixes.configurations("big-gpu")}
    assert on_gpu == {*(switch.name for switch in CLOTHES.switches), "all"}


@pytest.mark.long
def test_a_slow_pipeline_is_diagnosed_and_a_fixed_one_is_clean():
    rows = profiling.diagnose("small")
    names = rows.groupby(["pipeline", "variant"])["finding"].unique()
    everywhere = {"unaligned sizes", "separate projections of one input", "unfused optimizer"}
    assert everywhere | {"result never used"} <= set(names["gpt", "slow"])
    # Steps of milliseconds wait for their worker where the machine does other work, too.
    assert set(names["gpt", "fixed"]) <= {"nothing", "waiting for the loader"}
    assert not rows["where"].dropna().str.startswith("/").any()


def test_a_step_can_be_drawn_from_its_trace_by_its_parts():
    rows = profiling.timeline("small")
    assert (rows["begin_ms"] <= rows["end_ms"]).all()
    assert set(rows["variant"]) == {"slow", "fixed"}
    for _, step in rows.groupby(["pipeline", "fault", "variant"]):
        assert {"load", "forward", "backward", "optimizer"} <= set(step.loc[step["track"] == "annotations", "name"])
        assert {"forward", "backward"} <= set(step.loc[step["track"] == "host", "part"])
        assert (step["track"] != "annotations").sum() <= DRAWN


def test_a_planted_fault_takes_away_what_would_hide_it():
    fixed = planting.fixes_of("vit", planting.FIXED, "cpu")
    assert fixed - planting.planted("vit", ["decode_once"], "cpu") == {"decode_once", "photos_on_device", "workers"}


@pytest.mark.parametrize(("step_ms", "workers", "steps"), [(500, 0, 1), (500, 8, 8), (60, 0, 5), (5, 4, 10)])
def test_a_block_on_a_gpu_is_long_beside_a_launch_and_sees_a_whole_burst_of_workers(step_ms, workers, steps):
    assert planting.block_steps(step_ms, workers, most=10) == steps
