import pytest
import torch
from torch import nn

from helpers.amp import DynamicGradScaler
from helpers.profiling.gpt_pipeline import ALL
from helpers.summary import STAGES, run
from helpers.summary.experiments import ALONE, CUMULATIVE, START, chosen, stages
from helpers.summary.stages import BATCHES, COMPILED, FUSED, MIXED, PRECISION, PROFILED, build

FAST = {"samples": 8, "validation_samples": 2, "workers": 0}


def test_each_fix_of_the_pipeline_is_in_exactly_one_stage_but_bf16_which_mixed_precision_replaces():
    fixes = [fix for stage in STAGES.values() for fix in stage.fixes]
    assert sorted([*fixes, PRECISION]) == sorted(ALL)


def test_stages_switch_on_what_they_say():
    plain = build(frozenset(), preset="small", **FAST)
    assert plain.scaler is None and plain.half is None and not plain.fixes
    mixed = build(frozenset({MIXED, FUSED}), preset="small", **FAST)
    assert isinstance(mixed.scaler, DynamicGradScaler) and mixed.half == torch.float16
    assert mixed.optimizer.defaults["fused"] and not plain.optimizer.defaults["fused"]


@pytest.mark.parametrize("names", [[], [BATCHES, PROFILED, FUSED]])
def test_a_training_by_stages_learns_from_equally_many_real_tokens(names):
    row = run(names, **FAST)
    assert row["real_tokens"] == run([], **FAST)["real_tokens"] > 0
    assert 0 < row["epoch_s"] < row["train_s"]
    assert 0 < row["validation_loss"] < 10
    assert row["skipped_steps"] == 0


def test_mixed_precision_scales_its_loss_and_still_learns():
    plain, mixed = (run(names, **FAST, dropout=0.0) for names in ([], [MIXED]))
    assert mixed["validation_loss"] == pytest.approx(plain["validation_loss"], abs=0.02)


def test_stages_are_added_in_order_or_stand_alone():
    names = list(STAGES)
    assert chosen(START, "none", names) == []
    assert chosen(ALONE, PROFILED, names) == [PROFILED]
    assert chosen(CUMULATIVE, PROFILED, names) == [MIXED, BATCHES, PROFILED]
    full = stages.configurations("full")
    assert len(full) == 3 * (1 + len(names) + len(names) - 1)
    assert all(set(chosen(c["way"], c["stage"], names)) <= set(names) for c in full)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"stages": ["bacthing"]}, "unknown stage 'bacthing'; valid: mixed precision, batching"),
        ({"stages": "compile"}, r"stages is 'compile'; it must be names, such as \['compile'\]"),
        ({"preset": "huge"}, "unknown preset 'huge'; valid: small, reduced, full"),
        ({"epochs": 0}, "epochs is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(wrong, said):
    with pytest.raises(ValueError, match=said):
        run(**{"stages": []} | wrong)


def test_norms_stay_torchs_where_ours_would_not_run():
    if torch.cuda.is_available():
        pytest.skip("ours run here")
    norms = [
        m for m in build(frozenset({FUSED}), preset="small", **FAST).model.modules() if isinstance(m, nn.LayerNorm)
    ]
    assert norms and all(type(norm) is nn.LayerNorm for norm in norms)


def test_the_command_trains_by_stages(capsys):
    from helpers.__main__ import main

    assert main(["train", "--stages", f"{BATCHES},{FUSED}", "--epochs", "1"]) == 0
    assert '"train_s"' in capsys.readouterr().out
    assert main(["train", "--stages", "all", "--data", "base"]) == 2
    assert "--stages switches data itself" in capsys.readouterr().err
    assert main(["train", "--stages", "faster"]) == 2
    assert COMPILED in capsys.readouterr().err
