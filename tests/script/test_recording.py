"""Scripts as people write them, recorded from here and by the command: what is recorded, printed, and passed on."""

import json
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import torch
from script.recorded import in_steps, read, watch

import helpers
from helpers.cli import main
from helpers.script import children, windows
from helpers.script.recording import NothingRecorded, record_script
from helpers.script.running import end_of_iteration

HEAD = """
import sys, torch
from torch import nn
model = nn.Linear(4, 4)
def optimizer(kind=torch.optim.SGD, of=model, **options):
    return kind(of.parameters(), lr=0.1, **options)
def loss(of=model):
    return of(torch.randn(2, 4)).square().mean()
"""
PLAIN = """
optimizer, seen = optimizer(), 0
for seen in range(1, 41):
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def not_observed(monkeypatch):
    """Scripts end with their last window, however their iterations vary."""
    constants = {"OBSERVED": 0, "OBSERVED_S": 0.0, "SLOW_SEEN": math.inf, "SLOW_SHARE": math.inf}
    for name, value in constants.items():
        monkeypatch.setattr(windows, name, value)


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(body, name="train.py"):
        (tmp_path / name).write_text(HEAD + textwrap.dedent(body))
        return name

    return write


def test_a_plain_loop_is_recorded_after_its_warm_up_and_stopped(script, capsys):
    step = torch.optim.Optimizer.profile_hook_step
    recording = watch(script(PLAIN + "print('the end')\n"), steps=4)
    assert in_steps(recording.costs) == [(1, 1)] * 4
    assert in_steps(recording.places) == [(1, 1)] * 3
    assert recording.note == "" and "the end" not in capsys.readouterr().out
    assert recording.costs == Path("profile-train/costs.json.gz").resolve()
    costs, places = read(recording.costs), read(recording.places)
    assert -0.9 < costs["slowed_by"] < 20
    assert not any(e.get("cat") == "python_function" for e in costs["traceEvents"])
    frames = [e for e in places["traceEvents"] if e.get("cat") == "python_function"]
    line = (HEAD + PLAIN).splitlines().index("    optimizer.step()") + 1
    assert any(str(e["args"].get("Called from")).endswith(f"train.py({line}): <module>") for e in frames)
    assert not any("script/recording" in e["name"] for e in frames)
    assert torch.optim.Optimizer.profile_hook_step is step
    assert "running" not in torch.optim.SGD.step.__code__.co_filename


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "counts"),
    [
        pytest.param(
            """
            second = nn.Linear(4, 4)
            d, g = optimizer(), optimizer(of=second)
            for _ in range(20):
                for _ in range(3):
                    loss().backward(); d.step()
                loss(second).backward(); g.step()
            """,
            (4, 4),
            id="a GAN whose discriminator steps three times",
        ),
        pytest.param(
            """
            layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
            optimizers = [optimizer(of=layer) for layer in layers]
            for _ in range(20):
                loss(layers).backward()
                for each in reversed(optimizers): each.step()
            """,
            (5, 1),
            id="an optimizer per layer",
        ),
        pytest.param(
            """
            optimizer = optimizer()
            for i in range(80):
                loss().backward()
                if i % 4 == 3: optimizer.step()
            """,
            (1, 4),
            id="accumulated gradients",
        ),
        pytest.param(
            """
            optimizer = optimizer(torch.optim.AdamW, foreach=True)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
            def closure():
                value = loss()
                value.backward()
                return value
            for _ in range(30): optimizer.step(closure=closure); schedule.step()
            """,
            (1, 1),
            id="a closure, and a schedule of the learning rate",
        ),
        pytest.param(
            """
            class Clipped(torch.optim.SGD):
                def step(self, closure=None):
                    return super().step(closure)
            optimizer(); optimizer = optimizer(Clipped)
            for _ in range(30): loss().backward(); optimizer.step()
            """,
            (2, 1),
            id="a step that calls its base's",
        ),
        pytest.param(
            """
            for epoch in range(12):
                fresh = optimizer()
                for _ in range(5): loss().backward(); fresh.step()
                del fresh
            """,
            (1, 1),
            id="a new optimizer each epoch",
        ),
    ],
)
def test_an_iteration_is_a_cycle_of_the_optimizers(script, body, counts):
    recording = watch(script(body), steps=3, after=6)
    assert in_steps(recording.costs) == [counts] * 3
    assert in_steps(recording.places) == [counts] * 3


def test_an_optimizer_that_rarely_steps_does_not_end_the_iterations():
    often, rare = (torch.optim.SGD([torch.zeros(1, requires_grad=True)]) for _ in range(2))
    ends = end_of_iteration()
    ended = Counter()
    for number in range(100):
        ended["often"] += ends(often)
        ended["rare"] += number % 20 == 0 and ends(rare)
    assert ended["rare"] == 0
    assert ended["often"] > 85


def test_a_script_that_never_steps_or_hardly_says_so(script):
    with pytest.raises(NothingRecorded, match=r"train.py ended without an optimizer step: .*torchrun"):
        watch(script("loss().backward()"))
    with pytest.raises(NothingRecorded, match=r"train.py ended after 2 iterations: at least 3"):
        watch(script("optimizer = optimizer(); optimizer.step(); optimizer.step()"))
    assert not list(Path.cwd().glob("profile-*"))


@pytest.mark.parametrize(("iterations", "recorded"), [(8, 3), (14, 4)], ids=["in the first window", "in that of costs"])
def test_a_script_that_ends_early_gives_its_whole_iterations(script, iterations, recorded):
    recording = watch(script(PLAIN.replace("41", str(iterations + 1)) + "sys.exit(4)"))
    assert in_steps(recording.costs) == [(1, 1)] * recorded
    assert recording.places is None and recording.code == 4
    assert f"train.py ended after {iterations} iterations: {recorded} recorded" in recording.note


def test_where_torch_loses_count_of_calls_the_times_are_kept_without_source_lines(script, monkeypatch):
    stop = windows.OwnProfiler.stop

    def stopped(profiler):
        stop(profiler)
        if profiler.with_stack:
            raise RuntimeError("!stack.empty() INTERNAL ASSERT FAILED. Python replay stack is empty.")

    monkeypatch.setattr(windows.OwnProfiler, "stop", stopped)
    recording = watch(script(PLAIN), steps=4)
    assert in_steps(recording.costs) == [(1, 1)] * 4 and recording.places is None
    assert "train.py is recorded without source lines: torch" in recording.note


def test_what_a_script_that_never_steps_passes_to_exit_is_passed_on(script):
    with pytest.raises(SystemExit) as end:
        watch(script("sys.exit(3)"))
    assert end.value.code == 3


def test_a_failing_script_shows_its_own_traceback(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch's puts the rank before each line
    code = main(["profile", script(PLAIN.replace("41", "15") + "torch.zeros(2) + torch.zeros(3)")])
    message = capsys.readouterr().err
    assert code == 1
    assert message.startswith("Traceback (most recent call last):\n  File ")
    assert message.count("  File ") == 1
    assert "torch.zeros(2) + torch.zeros(3)" in message
    assert "RuntimeError: The size of tensor a" in message
    assert not torch.autograd._profiler_enabled()


def test_the_step_that_fails_shows_no_frame_of_the_profiler(script, capsys):
    assert main(["profile", script("optimizer = optimizer(); optimizer.step(closure=lambda: 1 / 0)")]) == 1
    assert "helpers" not in capsys.readouterr().err


OWN_PROFILER = """
optimizer = optimizer()
with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=3)) as profiler:
    for _ in range(10):
        loss().backward(); optimizer.step(); profiler.step()
print(len(profiler.events()) > 0)
"""


def test_a_script_with_a_profiler_of_its_own_gets_one_line(script, capsys):
    assert main(["profile", script(OWN_PROFILER)]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "train.py starts a profiler of its own" in message
    assert main(["profile", "--continue", "train.py"]) == 1
    assert capsys.readouterr().out.startswith("True\n")


def test_a_profiler_that_the_script_starts_ends_the_window(script):
    recording = watch(script(PLAIN.replace("41", "15") + OWN_PROFILER.replace(" = optimizer()", ".zero_grad()")))
    assert in_steps(recording.costs) == [(1, 1)] * 4
    assert "a profiler of its own" in recording.note


def test_the_script_is_stopped_past_its_handlers_and_its_last_blocks_run(script, capsys):
    body = """
    optimizer = optimizer()
    try:
        while True:
            try: loss().backward(); optimizer.step()
            except Exception: print("caught")
    finally: print("finally")
    """
    watch(script(body), steps=2, after=3)
    assert capsys.readouterr().out == "finally\n"


def test_a_script_that_is_stopped_with_gradients_off_leaves_them_on(script):
    body = """
    optimizer = optimizer()
    while True:
        with torch.enable_grad():
            loss().backward()
        torch.set_grad_enabled(False)
        optimizer.step()
    """
    watch(script(body))
    assert torch.is_grad_enabled()


def test_the_diagnosis_is_printed_where_the_script_had_not_redirected_it(script, capsys):
    assert main(["profile", "--steps", "2", script("import io; sys.stdout = io.StringIO()" + PLAIN)]) == 0
    assert "2 steps" in capsys.readouterr().out


def test_a_script_that_swallows_the_stop_runs_to_its_end_once(script, capsys):
    body = """
    optimizer = optimizer()
    for i in range(30):
        try: loss().backward(); optimizer.step()
        except BaseException as error: print(i, type(error).__name__)
    """
    recording = watch(script(body), steps=2, after=3)
    assert in_steps(recording.costs) == [(1, 1)] * 2
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a SystemExit, which ends it
def test_a_training_in_a_thread_is_recorded(script):
    body = """
    import threading
    def train():
        mine = optimizer()
        for _ in range(40): loss().backward(); mine.step()
    thread = threading.Thread(target=train); thread.start(); thread.join()
    """
    assert in_steps(watch(script(body), steps=2).costs) == [(1, 1)] * 2


def test_a_scaler_that_skips_steps_does_not_end_iterations(script):
    body = """
    optimizer, scaler = optimizer(), torch.amp.GradScaler("cpu", init_scale=4.0)
    for i in range(60):
        value = loss() * (float("inf") if i % 10 == 5 else 1)
        scaler.scale(value).backward(); scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
    """
    counts = in_steps(watch(script(body), steps=8, after=8).costs)
    assert Counter(counts) == {(1, 1): 7, (1, 2): 1}


LOADER = """
import multiprocessing, os
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self): return 400
    def __getitem__(self, i):
        assert __name__ == ("__main__" if sys.argv[1] == "fork" else "__mp_main__")
        return torch.randn(4)

if __name__ == "__main__":
    optimizer = optimizer()
    loader = DataLoader(Numbers(), batch_size=4, num_workers=1, prefetch_factor=8, multiprocessing_context=sys.argv[1])
    for batch in loader:
        model(batch).square().mean().backward()
        optimizer.step()
"""


def test_prefetched_batches_are_used_up_first_and_workers_neither_recorded_nor_left_behind(script):
    recording = watch(script(LOADER), ["fork"], steps=2)
    assert in_steps(recording.costs) == [(1, 1)] * 2
    assert not multiprocessing.active_children()
    events = read(recording.costs)["traceEvents"]
    assert {e["pid"] for e in events if "_MultiProcessingDataLoaderIter" in e.get("name", "")} == {os.getpid()}
    marks = {e["name"] for e in events if e["name"].startswith("ProfilerStep#")}
    assert marks == {"ProfilerStep#23", "ProfilerStep#24"}


def test_options_after_the_script_are_the_scripts(script, tmp_path, capsys):
    (tmp_path / "package").mkdir()
    body = """
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int); parser.add_argument("--continue", action="store_true")
    print(vars(parser.parse_args()), __name__, sys.path[0], sys.argv[0], __file__)
    """
    script(textwrap.dedent(body) + PLAIN.replace("41", "25") + "print('the end')", "package/train.py")
    assert main(["profile", "--steps", "2", "--continue", "package/train.py", "--steps", "7", "--continue"]) == 0
    out, err = capsys.readouterr()
    first, _, after = out.partition("the end\n")
    options = {"steps": 7, "continue": True}
    assert first == f"{options} __main__ {tmp_path}/package package/train.py {tmp_path}/package/train.py\n"
    assert "2 steps, median" in after
    assert in_steps(tmp_path / "profile-train/costs.json.gz") == [(1, 1)] * 2
    assert "--steps --continue goes to" in err and err.endswith(f"saved in {tmp_path}/profile-train\n")


def test_a_module_is_run_by_its_name(script, tmp_path, capsys, monkeypatch):
    (tmp_path / "package").mkdir()
    script("from . import value\nprint(__name__, __spec__.name, value, sys.argv[1:])\n" + PLAIN, "package/task.py")
    (tmp_path / "package/__init__.py").write_text("value = 5")
    formats = ["--json", "--html", "page.html"]
    assert main(["profile", "--output", "here", *formats, "-m", "package.task", "--steps", "9"]) == 0
    printed = capsys.readouterr()
    assert "__main__ package.task 5 ['--steps', '9']\n" in printed.err
    assert json.loads(printed.out)["steps"] == 8  # stdout is one document
    assert "<html" in Path("page.html").read_text()
    assert in_steps("here/costs.json.gz") == [(1, 1)] * 8


def test_a_variable_that_comes_too_late_for_torch_is_told(script, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    recording = watch(script("import os\nos.environ['OMP_NUM_THREADS'] = '7'\n" + PLAIN), steps=1, after=3)
    assert recording.note == "train.py sets OMP_NUM_THREADS, which torch had read before: set it in the shell"


def test_a_folder_that_cannot_be_written_is_named_before_the_script_runs(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert main(["profile", script("print('it ran')\n" + PLAIN)]) == 1
    out, err = capsys.readouterr()
    assert err == f"dlspeed: {tmp_path}/profile-train can't be written: name another folder (--output)\n" and not out


def test_a_stop_by_the_keyboard_is_one_line(script, capsys):
    assert main(["profile", script("raise KeyboardInterrupt")]) == 130
    assert capsys.readouterr().err == "dlspeed: stopped\n"


def test_an_earlier_runs_profiles_make_way(script, tmp_path):
    folder = tmp_path / "profile-train"
    folder.mkdir()
    for name in ("rank0.json.gz", "places.json.gz", "observed3.json", "mine.json.gz"):
        (folder / name).touch()
    watch(script(PLAIN.replace("41", "8")), steps=1, after=6)
    assert sorted(file.name for file in folder.iterdir()) == ["costs.json.gz", "mine.json.gz", "observed.json"]


def test_many_events_or_python_calls_shorten_the_windows(script, monkeypatch):
    monkeypatch.setattr(windows, "EVENTS", 300)
    monkeypatch.setattr(windows, "CALLS", 10)
    recording = watch(script(PLAIN))
    assert 1 <= len(in_steps(recording.costs)) < 8
    assert recording.places is None and "Python calls an iteration: too many" in recording.note


def test_long_iterations_shorten_the_warm_up_and_the_windows(script, monkeypatch):
    monkeypatch.setattr(windows, "WARM_S", 0.0)
    monkeypatch.setattr(windows, "WINDOW_S", 0.0)
    recording = watch(script(PLAIN.replace("41", "13")))
    assert len(in_steps(recording.costs)) == len(in_steps(recording.places)) == 1


def test_steps_inside_the_backward_pass_are_recorded(script):
    body = """
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    for _ in range(40): loss(model).backward()
    """
    recording = watch(script(body), steps=3)
    assert [steps for steps, _ in in_steps(recording.costs)] == [4] * 3
    assert recording.places


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "profile what? SCRIPT [ARGS …] or -m MODULE [ARGS …]"),
        (["--steps", "0", "train.py"], "'0' is not a whole number above 0"),
        (["--after", "3", "nowhere.py"], "there is no script nowhere.py"),
        (["-m"], "profile what?"),
        (["-m", "no.such.module"], "No module named 'no'"),
    ],
)
def test_a_wrong_command_is_one_line(arguments, message, capsys):
    try:
        code = main(["profile", *arguments])
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1
    assert message in error


STARTED = """
import multiprocessing
def train(rank):
    for _ in range(10**6):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
if __name__ == "__main__":
    optimizer = optimizer()
    torch.set_num_threads(1)
    processes = [multiprocessing.get_context("fork").Process(target=train, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print("the end")
"""


@pytest.mark.long
def test_a_training_in_processes_that_the_script_starts_is_recorded_in_one_of_them(script, capsys):
    recording = watch(script(STARTED), steps=4)
    assert in_steps(recording.costs) == [(1, 1)] * 4
    assert recording.note == "what was recorded is a process that train.py started"
    assert "the end" not in capsys.readouterr().out
    assert not multiprocessing.active_children()


def test_a_spawned_process_finds_this_package_without_its_name_on_the_path():
    load = "import pickle, sys; print(pickle.load(sys.stdin.buffer).__module__)"
    call = pickle.dumps(children._Started())
    done = subprocess.run([sys.executable, "-P", "-c", load], input=call, capture_output=True, cwd="/")
    assert done.stdout.decode().strip() == "dlspeed.script.children"


def test_a_block_of_a_notebook_is_watched_to_its_end_or_until_enough_is_known(capsys):
    model = torch.nn.Linear(64, 64)
    optimizer, steps = torch.optim.SGD(model.parameters()), 0

    def train(most):
        nonlocal steps
        for _ in range(most):
            steps += 1
            optimizer.zero_grad()
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()

    with helpers.watch(steps=4, stop=True) as watched:
        train(10**6)
    assert 10 < steps < 10**6 and "4 steps" in str(watched.diagnosis) and "4 steps" in capsys.readouterr().out
    begun = steps
    with helpers.watch(steps=4) as watched:
        train(60)
    assert steps == begun + 60 and watched.diagnosis.steps == 4
    with pytest.raises(NothingRecorded, match="2 iterations ended in this block"), helpers.watch():
        train(2)


def test_a_script_in_which_nothing_steps_is_told_of_and_ended(script):
    lines = []
    with pytest.raises(NothingRecorded, match="ended without an optimizer step"):
        record_script(script("import time\ntime.sleep(600)"), (), windows.Plan(limit=0.3), tell=lines.append)
    assert any("no optimizer has stepped" in line for line in lines)


TWO_LOOPS = """
def train(steps, act):
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        act(loss()).backward()
        mine.step()
"""


@pytest.mark.parametrize("first", [18, pytest.param(60, marks=pytest.mark.long)])
def test_a_training_before_the_training_is_not_what_is_recorded(script, monkeypatch, first):
    monkeypatch.setattr(windows, "OBSERVED", 60)
    recording = watch(script(TWO_LOOPS + f"train({first}, torch.exp); train(200, torch.sin)"), steps=4)
    for window in (recording.costs, recording.places):
        names = [event["name"] for event in read(window)["traceEvents"]]
        assert "aten::sin" in names and "aten::exp" not in names
