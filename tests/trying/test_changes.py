"""Changes and their edits: the same training, whether the script is changed from outside or in its source."""

import contextlib
from pathlib import Path

import pytest

from helpers.findings import account
from helpers.trying import changes
from helpers.trying.change import Call, Shell, last_first
from helpers.trying.sides import Side, Sides, read

SCRIPT = (Path(__file__).parents[2] / "data" / "tried" / "classifier.py").read_text()
ON_LOSSES = ("autocast-bf16", "optimizer", "channels-last", "loader-workers", "compile")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("scripts")


def run(folder: Path, source: str, names: tuple[str, ...] = (), facts: dict | None = None):
    """What a process that runs this source under these changes tells of 12 steps."""
    script = folder / "train.py"
    script.write_text(source)
    with contextlib.chdir(folder):
        sides = Sides(script, [], False, str(folder.parent))
        sides.facts = facts or {}
        with sides.running(Side(sides.command, names), silence_s=600) as [(process, report)]:
            process.take({"drop": 0, "seconds": 0.0, "steps": 12})
            return read(report)


@pytest.fixture(scope="module")
def base(folder):
    return run(folder, SCRIPT)


def test_what_applies_is_seen_in_the_unchanged_script(base):
    applying = {name for name, change in changes.ALL.items() if not change.missing_because(base.facts)}
    assert applying >= {*ON_LOSSES, "set-to-none", "no-anomaly-mode", "not-deterministic", "same-batch", "no-output"}
    assert "loader-pinned" not in applying


FIT = "    def fit(self, loader):\n"
EVALUATE = "    def evaluate(self):\n        return self.net(torch.ones(1, 4, 6, 6))[0].requires_grad\n"
LOSSLESS = ("set-to-none", "no-anomaly-mode", "not-deterministic", "no-output")


@pytest.mark.long
@pytest.mark.parametrize("names", [ON_LOSSES[:4], LOSSLESS], ids=len)
def test_the_edit_is_the_same_training_as_the_change(folder, base, names):
    outside = run(folder, SCRIPT, names, base.facts)
    patched = SCRIPT
    of_source = [edit for name in names for edit in changes.ALL[name].edits(base.facts)]
    for edit in sorted(of_source, key=last_first):
        patched = edit.changed(patched)
    inside = run(folder, patched)
    assert outside.losses[:12] == inside.losses[:12]
    assert (outside.losses[:12] == base.losses[:12]) == ("autocast-bf16" not in names)
    assert any(inside.facts[fact] for fact in LOSSLESS[1:3]) != ("no-anomaly-mode" in names)
    assert ("zero_grad" in inside.facts["calls"]) == ("set-to-none" not in names)
    left = {name for name in names if not changes.ALL[name].missing_because(inside.facts)}
    assert left <= {"channels-last", "no-output"}  # the one leaves no fact behind, the other has no edit


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("all-threads", "torch.manual_seed(0)", "torch.set_num_threads(1); torch.manual_seed(0)"),
        ("fp32", "torch.manual_seed(0)", "torch.manual_seed(0); torch.set_default_dtype(torch.float64)"),
        ("no-grad", FIT, f"{EVALUATE}\n{FIT}        self.optimizer.param_groups[0]['lr'] = 1e-2 * self.evaluate()\n"),
        ("no-autocast", "self.net(x)[0]", 'torch.autocast("cpu", torch.bfloat16)(self.net)(x)[0]'),
    ],
)
def test_a_script_that_slows_itself_is_the_same_training_by_the_change_and_by_its_edit(folder, name, old, new):
    patched = source = SCRIPT.replace(old, new)
    seen, change = run(folder, source), changes.ALL[name]
    assert not change.missing_because(seen.facts)
    outside = run(folder, source, (name,), seen.facts)
    for edit in change.edits(seen.facts):
        patched = patched if isinstance(edit, Shell) else edit.changed(patched)
    inside = run(folder, patched)
    assert outside.losses[:12] == inside.losses[:12] != seen.losses[: 12 if name != "all-threads" else 0]
    assert name == "no-autocast" or change.missing_because(inside.facts)


@pytest.mark.parametrize(
    ("fused", "foreach", "applies"),
    [(False, None, True), (False, False, True), (False, True, False), (True, None, False)],
)
def test_an_optimizer_that_steps_one_tensor_after_another_is_fused_also_where_the_script_asks_for_that(
    fused, foreach, applies
):
    made = {"site": ["train.py", 3], "kind": "AdamW", "fused": fused, "foreach": foreach}
    assert (not changes.ALL["optimizer"].missing_because({"optimizers": {"train.py:3": made}})) == applies


def test_a_change_acts_on_parts_that_a_profile_has():
    parts = {value for name, value in vars(account).items() if name.isupper() and isinstance(value, str)}
    assert {part for change in changes.ALL.values() for part in change.parts} <= parts


def test_a_call_is_replaced_where_it_stands_and_its_function_kept():
    text = "a = 1\nb = f(a, g(2))  # why\nc = 3\n"
    changed = Call(("train.py", 2), "f", "wrapped({})").changed(text)
    assert changed == "a = 1\nb = wrapped(f)  # why\nc = 3\n"


def test_autocast_is_for_models_in_fp32():
    model = {"name": "model", "device": "cpu", "dtype": "torch.float32"}
    assert changes.Autocast().code(model) and not changes.Autocast().code(model | {"dtype": "torch.bfloat16"})
