"""Chapter 5's numbers from rows: rungs against their baselines, and what is missing of a ladder."""

from pathlib import Path

import pandas as pd
import pytest

from helpers.chapters import rush
from helpers.chapters.rush import predictions
from helpers.chapters.rush.transformers_llama import ALIKE
from helpers.rush.setup import START

ROOT = Path(__file__).parents[3]
NONE = pd.DataFrame()
ONEDNN = "fp32 products by oneDNN"
RATES = {START: 100.0, ONEDNN: 120.0, "mixed precision": 150.0, "fused AdamW": 450.0, "FlashAttention": 400.0}


def ladder(rows, ceilings=NONE, trials=NONE, peers=NONE):
    return rush.ladder.of_rows(rows, ceilings, trials, peers)


def rungs(rates=RATES, **others):
    """A row for each rung; fp32's product rate is 0.2 TFLOP/s, bf16's grows from rung to rung."""
    row = {"model": "tiny", "sequence": 64, "text": "text", "preset": "cpu", "step_ms": 1.0, "p20_ms": 1.0}
    row |= {"p80_ms": 1.0, "peak_gib": 1.0, "loss": 7.0, "compile_s": None, "mfu": None, "matmul_share": 0.5} | others
    rates_of = {step: 0.2 if step in (START, ONEDNN) else 0.5 + n / 10 for n, step in enumerate(rates)}
    rows = [row | {"step": s, "tokens_per_s": r, "product_tflops": rates_of[s]} for s, r in rates.items()]
    return pd.DataFrame(rows)


def test_a_rung_gains_over_its_baseline_and_the_start():
    named = ladder(rungs())
    assert {rung: f"{gain}" for rung, gain in named.gains.items() if gain.measured} == {
        ONEDNN: "1.20× (unpaired)",
        "mixed precision": "1.25× (unpaired)",
        "fused AdamW": "3.00× (unpaired)",
        "FlashAttention": "0.89× (unpaired)",
    }
    assert named.largest[0].rung == "fused AdamW"
    assert (named.best.rung, f"{named.total}") == ("fused AdamW", "4.50× (unpaired)")
    assert named.without.none == "none"


def test_a_rungs_share_is_of_the_rate_of_products_on_its_own_day():
    """As recorded on an H200, whose products ran at two rates on two days."""
    tokens_per_s = {START: 4904.73, "TF32": 14479.1, "batch 8": 67480.5}
    rows = rungs(tokens_per_s, model="llama-3.2-1b", sequence=2048, preset="big-gpu")
    rows = rows.assign(date=["1", "1", "2"], product_tflops=[51.3, 352.0, 680.2], matmul_share=[0.786, 0.338, 0.815])
    rows = pd.concat([rows, rows.iloc[2:].assign(step="bf16 residual stream", date="3", product_tflops=694.6)])
    whole = {"baseline": START, "rung": "batch 8", "ratio": 0.07, "low": 0.06, "high": 0.08, "pairs": 8}
    trial = pd.DataFrame([whole | {"median_ms": rows["step_ms"].iloc[2] * 680.2 / 694.6, "date": "3"}])
    ceilings = pd.DataFrame([{"dtype": "bfloat16", "size": 8192, "tflops": 680.2, "median_ms": 1.0, "p20_ms": 0.87}])
    named = ladder(rows, ceilings, trial)
    assert f"{named.start_share}" == "79%" and f"{named.best.share}" == "82% (81 to 82)"
    assert named.best.share.low == pytest.approx(named.best.share.high)
    assert named.best.of_fastest.value == pytest.approx(0.87 * named.best.share.value)


def test_a_trial_of_two_rungs_goes_before_their_rows_and_says_which_are_undecided():
    trial = {"ratio": 0.5, "low": 0.4, "high": 0.7, "pairs": 9, "median_ms": 20.0}
    trials = pd.DataFrame(
        [
            {"baseline": START, "rung": ONEDNN} | trial,
            {"baseline": "mixed precision", "rung": "fused AdamW"} | trial | {"high": 1.1},
            {"baseline": START, "rung": "fused AdamW"} | trial,
        ]
    )
    named = ladder(rungs(), NONE, trials)
    assert f"{named.gains[ONEDNN]}" == f"{named.total}" == "2.00× (1.43 to 2.50, 9 pairs)"
    assert f"{named.rung.mixed}" == "1.25× (unpaired)"
    assert named.without.undecided.startswith("fused AdamW ≤ ")
    assert ladder(rungs({**RATES, "batch 2": 900.0}), NONE, trials).best.rung == "fused AdamW"


def test_a_gpus_ladder_has_its_pairs_in_its_rows_and_the_whole_gain_in_another_table():
    pair = {"ratio": 0.5, "low": 0.4, "high": 0.7, "pairs": 16}
    rows = rungs({START: 100.0, "TF32": 150.0, "batch 8": 450.0}, preset="big-gpu")
    rows = pd.concat([rows.iloc[:2], rows.iloc[2:].assign(baseline="batch 4", **pair)])
    named = ladder(rows, NONE, pd.DataFrame([pair | {"baseline": START, "rung": "batch 8", "median_ms": 2.0}]))
    assert f"{named.gains['batch 8']}" == f"{named.total}" == "2.00× (1.43 to 2.50, 16 pairs)"
    assert f"{named.gains['TF32']}" == "1.50× (unpaired)"
    assert f"{named.best.rate}" == "338 tokens/s (225 to 450)"


def test_the_share_that_is_reached_is_the_median_of_all_timings_of_the_setup():
    trials = pd.DataFrame(
        [{"baseline": START, "rung": "fused AdamW", "ratio": 0.5, "low": 0.4, "high": 0.7, "pairs": 9}]
    )
    peers = pd.DataFrame({"variant": ["transformers", "transformers" + ALIKE], "baseline_ms": [10.0, 99.0]})
    named = ladder(rungs(step_ms=64.0), NONE, trials.assign(median_ms=20.0), peers)
    assert float(named.best.timings) == 3
    assert f"{named.best.rate}" == "1,440 tokens/s (450 to 2,880)"
    assert float(named.best.causal) < float(named.best.share)


def test_kept_pages_are_worth_what_the_plain_loops_trial_says():
    row = {"median_ms": 1.0, "baseline_ms": 3.0, "ratio": 1 / 3, "low": 0.3, "high": 0.4, "pairs": 5}
    named = rush.allocator.of_rows(pd.DataFrame([row | {"rung": START, "sequence": 512}]))
    assert f"{named.plain}" == "3.00× (2.50 to 3.33, 5 pairs)"


def test_a_rung_that_was_not_kept_is_named_with_its_reason():
    named = ladder(rungs({**RATES, "fused projections": 480.0, "max-autotune": 240.0}))
    assert named.rungs["rung"].iloc[-1] == "max-autotune" and named.rungs["speedup"].iloc[-1] == "0.50×"
    assert named.left.startswith("max-autotune (") and named.best.rung != "max-autotune"


def with_losses(**losses):
    rates = {START: 100.0, "TF32": 150.0, "batch 8": 450.0, "8-bit optimizer state": 500.0, "float8": 600.0}
    rows = rungs(rates, preset="big-gpu")
    return rows.assign(loss=rows["step"].map({"TF32": 7.01} | losses).fillna(7.0))


def test_a_rung_whose_loss_is_off_by_more_than_another_seeds_gains_nothing_anywhere():
    rows = with_losses(float8=8.5, **{"8-bit optimizer state": 7.3}).assign(seed_loss=None)
    rows.loc[rows["step"] == "float8", "seed_loss"] = 7.4
    named = ladder(rows)
    assert named.gains["8-bit optimizer state"].measured and not named.gains["float8"].measured
    assert named.left.endswith("float8 (trains to another loss)")
    off = rows["step"] == "TF32"
    unlike = rows.assign(loss=rows["loss"].where(~off, 9.0), tokens_per_s=rows["tokens_per_s"].where(~off, 700.0))
    assert ladder(rows.assign(tokens_per_s=unlike["tokens_per_s"])).best.rung == "TF32"
    assert not ladder(unlike).rung.tf32.measured and ladder(unlike).best.rung == "batch 8"


def test_without_another_seed_rungs_that_compute_the_same_say_what_a_loss_may_differ_by():
    named = ladder(with_losses(float8=8.5, **{"8-bit optimizer state": 7.05}))
    assert named.gains["8-bit optimizer state"].measured and not named.gains["float8"].measured
    recorded = pd.read_csv(ROOT / "data/results/nvidia-h200/rush/ladder.csv").query("method == 3")
    assert not ladder(recorded).gains["float8"].measured


def test_a_ladder_without_its_first_rung_has_no_total():
    rates = {step: rate for step, rate in RATES.items() if step != START}
    named = ladder(rungs(rates))
    of_start = named.total, named.start_share, named.losses.start, named.losses.apart
    assert not any(number.measured for number in of_start)
    assert named.best.rung == "fused AdamW" and not ladder(rungs({START: 1.0})).largest[0].gain.measured


def test_peers_with_equal_features_have_a_number_of_their_own():
    row = {"step_gib": 1.0, "ours_step_gib": 1.0, "loss": 7.0, "ours_loss": 7.0, "low": 1.0, "high": 1.3, "pairs": 8}
    names = ["transformers", "transformers, liger-kernel, fused AdamW, compile" + ALIKE]
    rows = pd.DataFrame(
        [row | {"variant": name, "ratio": ratio} for name, ratio in zip(names, (1.5, 1.1), strict=True)]
    )
    named = rush.peers.of_rows(rows)
    assert (named.fastest, f"{named.alike_liger:brief}") == ("transformers", "1.10×")


def test_the_fastest_peer_is_quoted_with_the_interval_that_its_row_has():
    row = {"tokens_per_s": 1.0, "ours_tokens_per_s": 2.0, "step_gib": 1.0, "ours_step_gib": 1.0}
    row |= {"loss": 7.0, "ours_loss": 7.0}
    rows = pd.DataFrame([row | {"variant": "slow", "ratio": 2.0}, row | {"variant": "fast", "ratio": 1.5}])
    named = rush.peers.of_rows(rows.assign(low=1.4, high=1.6, pairs=8))
    assert (named.fastest, f"{named.speedup}") == ("fast", "1.50× (1.40 to 1.60, 8 pairs)")


def test_losses_of_ranks_need_the_one_of_a_single_process():
    row = {"ranks": 2, "parameter_bytes": 2**20, "gradient_bytes": 2**20, "optimizer_bytes": 2**21, "last_loss": 6.5}
    named = rush.distributed.of_rows(pd.DataFrame([row | {"strategy": "ddp"}]))
    assert (float(named.ranks), f"{named.held['ddp']}") == (2, "4.00 MiB") and not named.held["zero3"].measured
    assert not named.apart.measured


def test_predictions_of_published_runs_are_as_exact_as_the_report_says():
    named = predictions.published_speed()
    assert len(named.table) == len(predictions.GPUS) * len(predictions.TRAININGS) and float(named.count) == len(
        named.runs
    )
    small = named.table[(named.table["GPU"] == "t4") & (named.table["model"] == "Llama-3.1-8B on 8")]
    assert small["fits"].str.startswith("no: ").all() and (named.table["fits"] == "yes").any()
    assert 0.3 < float(named.mfu.low) < float(named.mfu.high) < 0.7
    assert 0.05 < float(named.median) < 0.15 < float(named.p90) < 0.6


def test_the_tasks_steps_stand_beside_ours_in_their_order():
    rates = {START: 100.0, "TF32": 200.0, "mixed precision": 350.0, "fused AdamW": 385.0}
    rows = rungs(rates, preset="big-gpu").assign(peak_gib=[4.0, 4.0, 6.0, 6.0])
    kinds = {"none": (100.0, 8.0), "full": (70.0, 4.0)}
    lengths = [
        {"checkpointing": kind, "sequence": 4096, "tokens_per_s": rate, "peak_gib": peak}
        for kind, (rate, peak) in kinds.items()
    ]
    table = rush.task_steps.of_rows(rows, NONE, pd.DataFrame(lengths)).table.set_index("step")
    assert list(table.index[:2]) == ["mixed precision", "fused AdamW"]
    assert table.loc["mixed precision", "speed, ours"] == "3.50×" and f"{table.iloc[0]['memory, ours']}" == "1.50×"
    assert f"{table.iloc[1]['speed, task']} {table.iloc[1]['speed, ours']}" == "1.10× 1.10×"
    assert table.loc["batch 4", "speed, ours"] == "–"
    assert table.iloc[-1]["speed, ours"] == "0.70×" and f"{table.iloc[-1]['memory, ours']}" == "0.50×"


@pytest.mark.long
def test_predictions_stand_beside_each_of_a_gpus_rungs():
    row = {"model": "tiny", "sequence": 64, "preset": "big-gpu", "gpu": "NVIDIA H200", "mfu": 0.4, "peak_gib": 2.0}
    steps = {"no optimisation": 2e5, "FlashAttention": 1e6, "compile": 1e6, "batch 8": 2e6, "float8": 2e6}
    rows = pd.DataFrame([row | {"step": step, "tokens_per_s": rate} for step, rate in steps.items()])
    named = rush.predicted.of_rows(rows)
    steps.pop("float8")  # trains to another loss: there is no rate to predict
    assert named.table["rung"].tolist() == list(steps)
    assert named.table["predicted"].astype(float).nunique() == len(steps)  # each of its own
    ratios = [float(of) / rate - 1 for of, rate in zip(named.table["predicted"], steps.values(), strict=True)]
    assert [float(error) for error in named.table["off by"]] == pytest.approx(ratios)
    assert float(named.memory_error) == pytest.approx(named.table["count off by"].astype(float).abs().median())
    assert not named.in_16_bits.copies.measured
    assert not len(rush.predicted.of_rows(rows.assign(preset="cpu")).table)


def test_a_gain_over_a_baseline_without_a_row_names_it():
    pair = {"ratio": 0.5, "low": 0.4, "high": 0.7, "pairs": 16}
    rows = rungs({START: 100.0, "TF32": 150.0, "batch 8": 450.0}, preset="big-gpu", baseline="batch 4", **pair)
    table = ladder(rows).rungs.set_index("rung")
    assert table["baseline"].dropna().to_dict() == {"batch 8": "batch 4"}
    assert "baseline" not in ladder(rungs()).rungs
    timed = ladder(rows.assign(baseline_ms=2.0)).rungs  # batch 8 takes 1 ms
    assert "baseline" not in timed
    assert timed.iloc[-2][["rung", "tokens/s"]].tolist() == ["batch 4 (timed beside batch 8)", 225.0]


def test_compiling_is_earned_after_what_it_takes_over_what_a_step_saves():
    rows = rungs({START: 100.0, "compile": 150.0}, preset="big-gpu", compile_s=3.0, step_ms=2.0)
    in_pairs = rows.assign(ratio=0.5, low=0.4, high=0.6, pairs=8, baseline="cuDNN attention")
    in_pairs = pd.concat([in_pairs, in_pairs.iloc[1:].assign(step="FlashAttention", baseline="fused AdamW")])
    assert f"{ladder(in_pairs).rung.compiled:brief}" == "2.00×"
    assert f"{ladder(in_pairs).rung.compile_steps}" == f"{3000 / 2:,.0f}"


def test_what_trains_to_another_loss_has_no_share_of_this_trainings_products():
    rows = with_losses(float8=8.5, **{"8-bit optimizer state": 7.05}).assign(mfu=0.5)
    shown = ladder(rows).rungs.set_index("rung")[["MFU", "share of matmul rate"]]
    assert shown.loc["float8"].isna().all() and shown.drop("float8").notna().all(axis=None)
    assert ladder(rows).losses.another == "float8 8.500" and float(ladder(rows).losses.apart) < 0.1
