"""Training runs: every precision, exact resumption, errors in one line."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.cli import main
from helpers.text import SyntheticText
from helpers.train import DATA, PRECISIONS, Setup, build_task, build_trainer, train
from helpers.training import TaskTrainer, cars
from helpers.training.loop import fit


def run(**changes):
    return train(Setup(**{"task": "lm", "epochs": 1} | changes), progress=False)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_trains_both_tasks(precision):
    for task in ("lm", "segmentation"):
        found = run(task=task, precision=precision)
        assert 0 <= found["validation_accuracy"] <= 1
        assert found["steps"] == 4
        assert precision == "fp16" or math.isfinite(found["validation_loss"])


def test_a_learning_rate_that_decays_falls_to_zero_over_all_epochs():
    trainer, rates = build_trainer(Setup(task="segmentation", precision="fp32")), []
    trainer.task = replace(trainer.task, decays=True)
    fit(trainer, epochs=2, on_step=lambda _: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    assert rates == pytest.approx([trainer.task.learning_rate * (1 - done / 8) for done in range(8)])
    with pytest.raises(ValueError, match="preset is 'long'"):
        Setup(task="lm", preset="long")


def test_where_accuracy_is_a_goal_the_rate_decays(monkeypatch):
    pictures = {name: (torch.zeros(2, 3, 8, 8), torch.zeros(2, 1, 8, 8)) for name in ("train", "validation")}
    monkeypatch.setattr(cars, "_pictures", lambda *_: ("none", pictures))
    for preset in ("long", "full"):
        assert cars.segmentation_task(preset, None, torch.device("cpu"), seed=0).decays


def test_micro_batches_make_gradients_smaller_and_nothing_else():
    def gradients(count):
        built = build_trainer(Setup(task="segmentation", precision="fp32"))
        trainer = TaskTrainer(replace(built.task, micro_batches=count), built.precision)
        loss = trainer.step(next(trainer.epoch(0)))  # its gradients stay until the next
        return loss, [parameter.grad for parameter in trainer.model.parameters()]

    (loss, whole), (same_loss, shares) = gradients(1), gradients(64)
    assert torch.equal(loss, same_loss)
    assert all(torch.allclose(a / 64, b) for a, b in zip(whole, shares, strict=True))


def test_precisions_agree_where_nothing_is_lost():
    exact = run(precision="fp32")
    for precision in ("static", "dynamic", "torch-scaler"):
        assert run(precision=precision)["train_loss"] == pytest.approx(exact["train_loss"], rel=0.01)


def test_the_same_seed_gives_the_same_run_and_another_one_another():
    first, again, other = (run(seed=seed) for seed in (3, 3, 4))
    assert first["epochs"] == again["epochs"] != other["epochs"]


@pytest.mark.parametrize("data", DATA)
def test_each_way_of_batching_trains_on_the_same_tokens(data):
    task = build_task(Setup(data=data), torch.device("cpu"))
    for epoch in range(2):
        batches = list(task.batches(epoch))
        assert len(batches) == task.steps(epoch)
        counts = np.bincount(torch.cat([batch.targets[batch.targets != 0] for batch in batches]).numpy())
        assert counts.tolist() == _targets_of_the_text()
        again = list(task.batches(epoch))
        assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(batches, again, strict=True))
    assert run(data=data, precision="fp32")["steps"] == task.steps(0)


def _targets_of_the_text():
    text = SyntheticText(64, 0, vocab_size=500)
    return np.bincount(np.concatenate([text[i][1:33] for i in range(64)])).tolist()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": "chess"}, "task is 'chess'; valid: 'lm', 'segmentation'"),
        ({"precision": "fp8"}, "precision is 'fp8'; valid: 'fp32', 'fp16'"),
        ({"data": "heap"}, "data is 'heap'; valid: 'standard', 'base'"),
        ({"task": "segmentation", "data": "base"}, "segmentation has 'standard' only"),
        ({"epochs": 0}, "epochs is 0; it must be an integer of at least 1"),
        ({"seed": -1}, "seed is -1; it must be an integer of at least 0"),
        ({"clip": 0.0}, "clip is 0.0; it must be above 0"),
    ],
)
def test_a_wrong_setup_names_what_is_valid(changes, said):
    with pytest.raises(ValueError, match=said):
        Setup(**changes)


def _inside():
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.fixture
def rounded():
    """Products and convolutions in TF32, as a user may have set them."""
    before = _inside()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    yield _inside()
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def test_fp32_is_fp32_inside_of_products_and_nothing_is_changed_for_good(rounded):
    seen = []
    for precision in ("fp32", "bf16"):
        setup = Setup(task="segmentation", precision=precision, epochs=1)
        train(setup, progress=False, on_step=lambda _: seen.append(_inside()))
        assert _inside() == rounded
    assert seen == [("highest", False)] * 4 + [rounded] * 4


def test_the_settings_come_back_when_a_run_is_broken_off(rounded):
    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(Setup(precision="fp32"), progress=False, on_step=stop)
    assert _inside() == rounded


def test_no_optimizer_steps_one_tensor_after_another():
    for precision in PRECISIONS:
        optimizer = build_trainer(Setup(precision=precision)).optimizer
        assert optimizer.defaults["foreach" if precision == "fp16" else "fused"] is True


def test_a_step_on_pictures_copies_nothing_to_the_device():
    """The meta device stands for a GPU: what goes there from the CPU is a copy."""

    class Copies(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function._schema.name in ("aten::_to_copy", "aten::copy_")
            return function(*args, **(kwargs or {}))

    task = build_task(Setup(task="segmentation"), torch.device("meta"))
    for batches in (task.batches(0), task.validation()):
        with Copies() as copies:
            found = list(batches)
        assert len(found) > 1
        assert {batch.inputs.device.type for batch in found} == {"meta"}
        assert copies.count == 0


def test_the_command_ends_in_a_line_of_json(tmp_path, capsys):
    assert main(["train", "--epochs", "1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 4
    assert main(["train", "--path", str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert error.strip().count("\n") == 0
    assert "nowhere" in error
