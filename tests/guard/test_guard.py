"""A guarded step fails when it gets more to do, names the line, and stays quiet where it does the same work."""

import gc
import inspect
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from guarded import refactorings, regressions
from torch import nn

from helpers.distributed import launch
from helpers.guard.blocks import Guard
from helpers.guard.record import CannotGuard, MoreWork, key
from helpers.lab.machine import installed

ROOT = Path(__file__).parents[2]
ALL = "GUARD_ALL" in os.environ  # every pair; else those that take part of a second
QUICK = "second_forward checkpointing no_sync_lost wider_padding autocast_lost graph_break mask_as_index no_grad_lost"
COMPILED_LINES = {"kernels_split"}  # of compiled code the function is known, not the line


@pytest.fixture
def guard(tmp_path):
    """A guard with a file of its own; what it tells is in `told`."""
    guard = Guard(tmp_path / "speed_guard.json", tell=lambda text: guard.told.append(text))
    guard.told = []
    return guard


@pytest.fixture(autouse=True)
def _nothing_stays():
    """A case may have begun a process group, and what it compiled is no other test's."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.clear_compilation_metrics()


def step_of(guard, name, step, **options):
    with guard(name, **options):
        step()


def entry(guard, name="step"):
    return json.loads(guard.file.read_text())[key()][name]


def planted_lines(build):
    source = inspect.getsource(build) + inspect.getsource(regressions.Head) * (build is regressions.layer_in_fp32)
    return [" ".join(line.split()) for line in source.splitlines() if line.endswith("# planted")]


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in regressions.REGRESSIONS if ALL or n in QUICK.split()])
def test_more_to_do_fails_with_the_line_that_does_it(name, guard):
    build = regressions.REGRESSIONS[name]
    step_of(guard, name, build(False))
    step_of(guard, name, build(False))
    with pytest.raises(MoreWork) as failure:
        step_of(guard, name, build(True))
    named = re.findall(r"regressions\.py:\d+ (.*?)(?=, regressions\.py:|\n|$)", str(failure.value))
    assert name in COMPILED_LINES or any(line[:79] == text[:79] for line in planted_lines(build) for text in named)


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in refactorings.REFACTORINGS if ALL or n[0] in "asov"])
def test_the_same_work_written_anew_is_no_alarm(name, guard):
    build = refactorings.REFACTORINGS[name]
    step_of(guard, name, build(False))
    step_of(guard, name, build(True))
    assert [text for text in guard.told if "written" not in text] == []


def plain(waits=0):
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)

    def step():
        optimizer.zero_grad()
        loss = net(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        for _ in range(waits):
            loss.item()

    return step


def test_what_is_counted_of_a_step_can_be_computed(guard):
    step_of(guard, "step", plain(waits=2))
    numbers = entry(guard)
    assert numbers["FLOPs"] == numbers["FLOPs in 32 bits or more"] == 2 * 2 * 4 * 8 * 8  # no gradient for the input
    assert numbers["host waits"] == 2
    assert numbers["bytes stored"] == 2 * 4 * 8 * 4  # the input and the output
    assert numbers["operators by name"]["addmm"] == numbers["operators by name"]["_fused_sgd_"] == 1


@pytest.mark.long
def test_less_is_told_and_an_update_writes_it(guard):
    step_of(guard, "step", plain(waits=3))
    step_of(guard, "step", plain())
    assert guard.told[1:] == ["step: host waits 3 → 0 a step"]
    assert entry(guard)["host waits"] == 3
    guard.update = True
    step_of(guard, "step", plain())
    assert entry(guard)["host waits"] == 0
    step_of(guard, "step", plain(waits=1))
    assert "host waits 0 → 1 a step: test_guard.py:" in "".join(guard.told)


def test_a_block_may_allow_more(guard):
    step_of(guard, "step", plain())
    step_of(guard, "step", plain(waits=2), allow={"host waits": 2})
    with pytest.raises(MoreWork, match="host waits 0 → 3 a step"):
        step_of(guard, "step", plain(waits=3), allow={"host waits": 2})


def test_a_mask_tells_the_padding(guard):
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    with guard("step", steps=2) as counted:
        counted.mask(mask)
    assert entry(guard)["padding"] == 0.5
    assert entry(guard)["operators"] == entry(guard)["host waits"] == 0


def test_wrong_blocks_are_refused(guard):
    for options in ({"steps": 0}, {"steps": 1.5}, {"warm_up": -1}, {"allow": {"seconds": 1}}, {"allow": {"FLOPs": -1}}):
        with pytest.raises(ValueError, match=r"steps is|warm_up is|allow\["):
            step_of(guard, "step", plain(), **options)
    with guard("outer"), pytest.raises(RuntimeError, match="'inner' is inside of 'outer'"), guard("inner"):
        pass
    with pytest.raises(RuntimeError, match="begin it by a with statement"):
        guard("step").__enter__()
    with pytest.raises(RuntimeError, match="can't yield"):
        next(yielding(guard))
    assert "inner" not in guard.file.read_text()


def yielding(guard):
    with guard("step"):
        yield


def test_an_error_in_the_block_leaves_nothing_behind(guard):
    def state():
        modes = torch._C._len_torch_dispatch_stack(), torch._C._autograd._saved_tensors_hooks_is_enabled()
        return (*modes, sys.getprofile(), gc.isenabled(), torch.autograd.graph.saved_tensors_hooks.__init__)

    before, calls = state(), 0
    with pytest.raises(ZeroDivisionError), guard("step"):
        calls += 1
        1 / 0  # noqa: B018
    assert state() == before
    assert not guard.file.exists()
    step_of(guard, "step", plain())
    assert state() == before


def test_the_block_keeps_the_names_of_its_last_run(guard):
    seen = []
    with guard("step", steps=2, warm_up=1):
        result = torch.ones(2).sum()
        seen.append(result)
    assert result is seen[-1] and len(seen) == 1 + 1 + 2 + 1


@pytest.mark.parametrize("content", ["<<<<<<< HEAD", "[]", '{"2.13 cpu": []}', '{"2.13 cpu": {"step": {}}}'])
def test_a_damaged_record_is_named_and_kept(content, guard):
    guard.file.write_text(content)
    with pytest.raises(CannotGuard, match=r"speed_guard\.json can't be read .*restore it, or delete it"):
        step_of(guard, "step", plain())
    assert guard.file.read_text() == content


def test_a_folder_that_cannot_be_written_is_named():
    with pytest.raises(CannotGuard, match=r"/proc/speed_guard\.json can't be written"):
        step_of(Guard(Path("/proc/speed_guard.json")), "step", plain())


TEST = """
import pytest, torch
from pathlib import Path
WAITS = int(Path(__file__).with_name("waits").read_text())
@pytest.mark.parametrize("size", range(4))
def test_of_a_size(size, speed_guard):
    net = torch.nn.Linear(4 + size, 4)
    def step():
        loss = net(torch.ones(2, 4 + size)).sum()
        for _ in range(WAITS):
            loss.item()
    with speed_guard(f"step {size}", steps=3):
        step()
def test_another(speed_guard):
    with speed_guard("step 0"):
        pass
"""


def pytest_in(folder, *options):
    command = [sys.executable, "-m", "pytest", *PLUGIN, *options, "test_steps.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


PLUGIN = ("-q", "-p", "helpers.guard.plugin", "-p", "no:cacheprovider", "--import-mode=importlib")


@pytest.mark.long
def test_as_a_plugin_of_pytest_beside_xdist(tmp_path, capsys):
    (tmp_path / "test_steps.py").write_text(TEST)
    (tmp_path / "waits").write_text("0")
    first = pytest_in(tmp_path, "-n", "2", "-k", "size")
    assert first.returncode == 0, first.stdout
    assert first.stdout.count("written to") == 4
    steps = json.loads((tmp_path / "speed_guard.json").read_text())[key()]
    assert sorted(steps) == [f"test_steps.py, step {size}" for size in range(4)]

    (tmp_path / "waits").write_text("3")
    here = [*PLUGIN, "-c", os.devnull, f"--rootdir={tmp_path}", str(tmp_path / "test_steps.py"), "-k"]
    assert pytest.main([*here, "0 or another"]) == 1
    out = capsys.readouterr().out
    assert "host waits 0 → 3 a step: test_steps.py:11 loss.item()" in out
    assert "has a block named 'step 0', too" in out
    assert pytest.main([*here, "size", "--speed-guard-update"]) == 0
    out = capsys.readouterr().out
    assert out.count("host waits 0 → 3 a step") == out.count("written to") == 4


SCRIPT = """
import sys, torch
net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    loss = net(torch.ones(4, 8)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    # log
"""


def test_a_script_is_guarded_by_the_command(tmp_path, monkeypatch, capfd):
    from helpers.cli import main

    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    assert main(["guard", "--markdown", "-", str(file), "100"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("### `train.py 100`: nothing to compare with\n") and "train.py 100: written to" in err
    assert main(["guard", str(file), "100"]) == 0
    assert capfd.readouterr().out == ""
    file.write_text(SCRIPT.replace("# log", "print(loss.item())"))
    summary = tmp_path / "summary.md"
    assert main(["guard", "--markdown", str(summary), str(file), "100"]) == 3
    assert "host waits 0 → 1 a step: train.py:10 print(loss.item())" in capfd.readouterr().out
    assert summary.read_text().startswith("### `train.py 100`: more to do\n\n| line |")
    assert "\n| `train.py:10 print(loss.item())` | host waits | 0 → 1 a step |\n" in summary.read_text()
    assert main(["guard", "--update", str(file), "100"]) == 0
    assert "host waits 0 → 1" in capfd.readouterr().out
    assert main(["guard", str(file), "5"]) == 1
    assert "ended after 5 iterations: 7 are needed" in capfd.readouterr().err
    file.write_text("1 / 0")
    assert main(["guard", str(file)]) == 1
    assert "ZeroDivisionError" in capfd.readouterr().err
    for own, code in ((7, 7), (3, 1)):  # 3 is the comparison's
        file.write_text(f"raise SystemExit({own})")
        assert main(["guard", str(file)]) == code


def guarded_shards(folder):
    """On a rank: a step of sharded layers, three times, at last with waits; the message that this gives."""
    from torch.distributed.fsdp import fully_shard

    from helpers.distributed import joined

    with joined("gloo"):
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for part in (*net, net):
            fully_shard(part)
        optimizer = torch.optim.AdamW(net.parameters())
        guard, message = Guard(Path(folder) / "speed_guard.json"), ""
        for waits in (0, 0, 2):

            def step(waits=waits):
                optimizer.zero_grad()
                loss = net(torch.ones(4, 8)).square().mean()
                loss.backward()
                optimizer.step()
                return [loss.item() for _ in range(waits)]

            try:
                step_of(guard, "shards", step)
            except MoreWork as more:
                message += str(more)
    return message


@pytest.mark.long
def test_each_of_two_ranks_guards_its_shards(tmp_path):
    for rank, message in enumerate(launch(guarded_shards, 2, tmp_path)):
        assert message.startswith(
            f"shards, rank {rank} of 2 has more to do than speed_guard.json says\n  host waits 0 → 2"
        )
    steps = json.loads((tmp_path / "speed_guard.json").read_text())[key()]
    names = steps["shards, rank 0 of 2"]["operators by name"]
    assert (
        len(steps) == 2 and any("gather" in name for name in names) and any("reduce_scatter" in name for name in names)
    )


@pytest.mark.long
@pytest.mark.skipif(installed("transformers") is None, reason="needs transformers")
def test_a_training_step_of_transformers(guard, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=2, **sizes))
    options = TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, report_to="none")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(model, options)
    trainer.current_gradient_accumulation_steps = 1  # as training sets it
    ids = torch.randint(1, 50, (2, 16))
    batch = {"input_ids": ids, "labels": ids}
    for length in (16, 16):
        with guard("training_step", allow={"Python calls": 1}):
            trainer.training_step(model, {name: each[:, :length] for name, each in batch.items()})
    with pytest.raises(MoreWork, match="FLOPs"), guard("training_step"):
        trainer.training_step(model, {name: torch.cat([each, each]) for name, each in batch.items()})
