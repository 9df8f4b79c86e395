import sys

import pytest
import torch
from torch import nn

from helpers.amp import DynamicGradScaler
from helpers.chapters.summary.stages import CUMULATIVE, NAMES, START, chosen, stages
from helpers.text import TextError, vocab
from helpers.training import LANGUAGE, loop, task
from helpers.training import stages as staircase
from helpers.training.language import guess_scores
from helpers.training.stages import (
    BATCHES,
    COMPILED,
    FUSED,
    MIXED,
    PRECISION,
    PROFILED,
    STAGES,
    build_trainer,
    environment,
    run,
)

FAST = {"samples": 8, "validation_samples": 2, "workers": 0}


def test_each_fix_of_the_pipeline_is_in_exactly_one_stage_but_bf16_which_mixed_precision_replaces():
    fixes = [fix for stage in STAGES.values() for fix in stage.fixes]
    assert sorted([*fixes, PRECISION]) == sorted(switch.name for switch in LANGUAGE.switches)


def test_stages_switch_on_what_they_say():
    plain = build_trainer(frozenset(), preset="small", **FAST)
    assert plain.scaler is None and plain.precision.name == "fp32" and plain.faults == LANGUAGE.faults([])
    mixed = build_trainer(frozenset({MIXED, FUSED}), preset="small", **FAST)
    assert mixed.scaler is None and mixed.precision.dtype == torch.bfloat16
    assert mixed.optimizer.defaults["fused"] and not plain.optimizer.defaults["fused"]


def test_a_gpu_without_bf16_trains_in_fp16_with_our_loss_scale_and_a_cpu_in_fp32(monkeypatch):
    monkeypatch.setattr(staircase, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(task, "device", staircase.device)
    monkeypatch.setattr(task, "missing_because", lambda need: "emulated")
    precision = staircase.mixed_precision()
    assert isinstance(precision.scaler(torch.device("cpu")), DynamicGradScaler)
    monkeypatch.setattr(task, "device", lambda: torch.device("cpu"))
    assert staircase.mixed_precision().name == "fp32"  # on a CPU that would emulate it
    assert environment() == {}
    monkeypatch.undo()
    assert environment()["MALLOC_MMAP_MAX_"] == "0"  # a training on a CPU keeps its pages


def test_the_constant_guess_is_the_most_frequent_target_of_validation():
    trainer = build_trainer(frozenset(), preset="small", **FAST)
    targets = [token for batch in trainer.task.validation() for token in batch.targets.flatten().tolist() if token]
    most = max(targets.count(token) for token in set(targets))
    assert guess_scores(trainer.task)["guess_accuracy"] == pytest.approx(most / len(targets))


def test_the_learning_rate_rises_and_falls():
    trainer, rates = build_trainer(frozenset(), preset="small", **FAST), []
    schedule = staircase._schedule(trainer, 10)
    for number in range(20):
        schedule(loop.Step(number, None, None, None))
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates[0] < rates[1] == pytest.approx(max(rates)) and max(rates) <= trainer.task.learning_rate
    assert rates[2:] == sorted(rates[2:], reverse=True) and 0 < rates[-1] < 0.1 * rates[1]


def test_a_training_by_stages_learns_from_equally_many_real_tokens():
    rows = [run(names, **FAST, dropout=0.0) for names in ([], [MIXED], [BATCHES, PROFILED, FUSED])]
    assert rows[2]["real_tokens"] == rows[0]["real_tokens"] > 0
    assert rows[1]["validation_loss"] == pytest.approx(rows[0]["validation_loss"], abs=0.02)
    for row in rows:
        assert 0 < row["epoch_s"] < row["train_s"]
        assert 0 < row["validation_loss"] < 10
        assert row["skipped_steps"] == 0


def test_stages_are_added_in_order():
    assert chosen(START, "none", NAMES) == []
    assert chosen(CUMULATIVE, PROFILED, NAMES) == [MIXED, BATCHES, PROFILED]


def test_each_training_has_a_process_of_its_own_on_a_gpu_too(monkeypatch):
    apart = []
    monkeypatch.setitem(
        stages.measure.__globals__, "in_fresh_process", lambda fn, names, **options: apart.append(names) or {}
    )
    for stage in (MIXED, BATCHES):
        stages.measure(way=CUMULATIVE, stage=stage, seed=0, size="full")
    assert apart == [[MIXED], [MIXED, BATCHES]]


def test_attention_in_a_training_is_never_cudnns(monkeypatch):
    enabled, met = torch.backends.cuda.cudnn_sdp_enabled, []
    product, before = torch.nn.functional.scaled_dot_product_attention, enabled()

    def spy(*inputs, **options):
        met.append(enabled())
        return product(*inputs, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    run([BATCHES], **FAST)
    assert met and not any(met)
    assert enabled() == before


def test_without_torchtext_a_training_is_refused_in_a_line_before_a_worker_would_miss_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtext.data.utils", None)
    monkeypatch.setattr(vocab, "_tokenizer", vocab._tokenizer.__wrapped__)
    with pytest.raises(TextError, match=r"^tokenising needs torchtext: pip install torchtext==0.6.0 [^\n]*$"):
        LANGUAGE.prepare({"workers"}, preset="small")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"stages": ["bacthing"]}, "unknown stage 'bacthing'; valid: mixed precision, batching"),
        ({"stages": "compile"}, "stages is 'compile'; it must be a set of names"),
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
    model = build_trainer(frozenset({FUSED}), preset="small", **FAST).model
    assert {type(module) for module in model.modules() if "Norm" in type(module).__name__} == {nn.LayerNorm}


def test_the_command_trains_by_stages(capsys, monkeypatch):
    from helpers.cli import main

    monkeypatch.setattr(staircase, "environment", dict)  # so that it needs no process of its own
    assert main(["train", "--stages", f"{BATCHES},{FUSED}", "--epochs", "1"]) == 0
    assert '"train_s"' in capsys.readouterr().out
    assert main(["train", "--stages", "all", "--data", "base"]) == 2
    assert "--stages switches the rest itself" in capsys.readouterr().err
    assert main(["train", "--stages", "faster"]) == 2
    assert COMPILED in capsys.readouterr().err
