"""Chapter 1's numbers, from rows made by hand."""

import pandas as pd
import pytest

from helpers.chapters import amp
from helpers.chapters.amp.gradient_time import TORCHS_KERNELS


def training(precision, seed, accuracy, **changes):
    row = {"task": "segmentation", "precision": precision, "seed": seed, "validation_accuracy": accuracy}
    row |= {"validation_loss": 0.1, "constant_accuracy": 0.8, "diverged": "no", "zero_share": 0.0, "skipped_steps": 0.0}
    row |= {
        "first_scale": None,
        "growth_interval": 5,
        "micro_batches": 4,
        "steps": 80,
        "source": "drawn",
        "training_s": 2.0,
    }
    return row | {"training_s": 2.0} | changes


QUALITY = pd.DataFrame(
    [
        *(training("fp32", seed, accuracy) for seed, accuracy in enumerate((0.94, 0.95, 0.96))),
        *(training("amp", seed, 0.8, zero_share=0.9) for seed in range(3)),
        *(training("static", seed, accuracy, first_scale=64.0) for seed, accuracy in enumerate((0.95, 0.95, 0.98))),
        training("fp16", 0, 0.8, diverged="yes"),
    ]
)


def test_accuracies_are_compared_seed_by_seed_with_an_interval():
    runs = amp.quality.of_rows(QUALITY).segmentation
    assert f"{runs.points['static']}" == "1.00 points (-1.48 to 3.48, 3 pairs)"
    assert runs.points["static"].at_least(-1).outcome == "undecided"
    assert runs.points["amp"].at_most(-5).outcome == "holds"
    assert runs.over_guess.value == pytest.approx(0)
    assert (f"{runs.lost}", f"{runs.accuracy['static']}") == ("90.0%", "0.960")
    assert (f"{runs.lowest}", runs.scaled.n, f"{runs.seconds['static']}") == ("0.9500", 3, "2 s")
    table = runs.table.set_index("training")
    assert table.loc["pure fp16", ["accuracy", "diverged"]].tolist() == ["–", "1 of 1"]
    assert table.loc["AMP, static scale", "points against fp32"] == "+1.00"


def test_what_is_not_measured_is_a_number_that_says_so():
    runs = amp.quality.of_rows(QUALITY)
    assert not runs.segmentation.points["bf16"].measured
    assert not runs.lm.accuracy["fp32"].measured and not runs.lm.steps.measured
    assert not runs.dynamic_scale.measured and f"{runs.static_scale}" == "64"
    assert len(runs.lm.table) == 0


def test_what_fp16_rounds_to_zero_is_a_share_of_the_nonzero_gradients_of_activations():
    rows = pd.DataFrame(
        {"task": "lm", "kind": "activations", "exponent": [None, -30, -20, 0], "share": [0.2, 0.2, 0.2, 0.4]}
    )
    named = amp.exponents.of_rows(rows)
    assert f"{named.zeroed['lm']}" == "25%" and not named.zeroed["segmentation"].measured
    assert list(named.tasks["lm"]) == ["activations"]


def scaled(million, variant, ratio, low=None, high=None):
    row = {"million_parameters": million, "variant": variant, "median_ms": 1.0, "p20_ms": 1.0, "p80_ms": 1.0}
    row["torch_ms"] = 1.2
    for name in ("torch", "no_scaler"):
        row |= {f"ratio_to_{name}": ratio, f"ratio_to_{name}_low": low, f"ratio_to_{name}_high": high}
        row |= {f"ratio_to_{name}_pairs": 20}
    return row | {"host_reads": 0}


def test_a_ratio_has_the_interval_that_was_recorded():
    old = amp.scaler_step.of_rows(pd.DataFrame([scaled(10, "ours", 0.9), scaled(100, "ours", 0.8)]))
    assert (f"{old.over_torch}", f"{old.speedup}") == ("0.80× (unpaired)", "1.25× (unpaired)")
    new = amp.scaler_step.of_rows(pd.DataFrame([scaled(10, "ours", 0.8, 0.75, 0.85)]))
    assert f"{new.speedup}" == "1.25× (1.18 to 1.33, 20 pairs)"
    host = amp.scaler_step.of_rows(pd.DataFrame([scaled(10, "ours", 0.8, 0.75, 0.85) | {"device_share": 0.5}]))
    assert not host.over_torch.measured and not host.speedup.measured
    assert "million_parameters" in old.table and "million_parameters" not in new.table


def test_torchs_own_fp16_kernels_are_named_where_both_kinds_were_timed():
    timed = {"task": "segmentation", "median_ms": 2.0, "p20_ms": 1.0, "p80_ms": 3.0, "peak_gib": 0.1}
    rows = pd.DataFrame(
        [
            timed | {"precision": "fp32", "kernels": TORCHS_KERNELS},
            timed | {"precision": "dynamic", "kernels": "fp32's, rounded"},
            timed | {"precision": "dynamic", "kernels": TORCHS_KERNELS, "median_ms": 20.0},
        ]
    )
    times = amp.gradient_time.of_rows(rows)
    assert times.table["training"].tolist() == ["fp32", "AMP, dynamic scale", "AMP, dynamic scale, torch's kernels"]
    assert times.fp16.value == 10 and not times.bf16.measured
    assert not times.memory["segmentation"].measured
    halved = timed | {"precision": "bf16", "kernels": TORCHS_KERNELS, "peak_gib": 0.05}
    assert f"{amp.gradient_time.of_rows(pd.DataFrame([*rows.to_dict('records'), halved])).memory['segmentation']}" == (
        "0.50×"
    )
