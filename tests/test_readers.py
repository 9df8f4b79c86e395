"""Any file that the tool reads, broken anyhow: it is read, or refused in one line, and stays as it is."""

import json
from pathlib import Path

import pytest
from findings.synthetic import Synthetic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.book import RecordError, store
from helpers.findings.diagnose import diagnose
from helpers.fit import Plan, estimate, plan_run
from helpers.grading.cells import read
from helpers.guard.counting import COUNTERS, Counts
from helpers.guard.record import LINES, NAMES, CannotGuard, compare, key
from helpers.guard.record import read as read_guarded
from helpers.lab.cards import card
from helpers.pipelines.formats import FORMATS, Sample
from helpers.refereeing.cases import FIX, SCRIPT, WrongCase, read_case
from helpers.script.observation import Observation, read_observation

WILD = st.sampled_from([
    10**400, -(10**400), 1e308, float("nan"), -1, 0, "", "\ud800", "9" * 400, None, True, [], {}, [[None]], {"a": {}},
])  # fmt: skip


def trace(folder):
    gpu = Synthetic()
    for number in range(2):
        with gpu.step():
            gpu.train_step(number)
    return json.dumps({"deviceProperties": [{"id": 0, "computeMajor": 8}], "traceEvents": gpu.events})


def observed(folder):
    Observation(seconds=1.0, iterations=[0.1], memory=[(1, 2, 3)]).write(folder / "file")
    return (folder / "file").read_text()


def guarded(folder):
    counters = {counter: 2.0 for counter in COUNTERS}
    return json.dumps({key(): {"step": counters | {LINES: {"train.py: a": counters}, NAMES: {"aten::mm": 2}}}})


def compare_with_guarded(file):
    counts = Counts()
    counts.steps = 1
    counts.operator("aten::add", (("train.py", 1),))
    for step in read_guarded(file).get(key(), {}).values():
        compare(step, counts, {})


def case(folder):
    (folder / SCRIPT).write_text("print(1)")
    (folder / FIX).write_text("")
    return 'same = "bitwise"\narguments = ["3"]\nseconds = 30\nevaluation = "loss ([0-9.]+)"\n'


def read_as_case(file):
    known = read_case(file.rename(file.with_name("case.toml")).parent)
    assert known.seconds > 0 and all(isinstance(argument, str) for argument in known.arguments)


def config(folder):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    return json.dumps(sizes | {"architectures": ["LlamaForCausalLM"], "text_config": sizes})


def plan_of_config(file):
    named = file.rename(file.with_name("config.json"))
    estimate(plan_run(Plan(model=str(named), batch=1, sequence=8)), card("h100"))


def notebook(folder):
    cells = [{"cell_type": "code", "metadata": {"tags": []}, "source": ["x = 1\n", "%time x"]}]
    return json.dumps({"cells": cells})


def read_as_notebook(file):
    assert all("\n" not in fault for fault in read(file.rename(file.with_name("x.ipynb"))).faults)


def record(folder):
    store.replace(folder / "file", [dict.fromkeys(store.PROVENANCE, "a") | {"status": "ok", "size": 1}])
    return (folder / "file").read_text()


def tar(folder):
    FORMATS["webdataset"].write([Sample("a", 1, b"data")] * 2, folder / "made", "image")
    return (folder / "made" / "00000.tar").read_bytes().decode("latin-1")


def read_as_tar(file):
    file.rename(file.with_name("00000.tar"))
    list(FORMATS["webdataset"].open_(file.parent).stream())


READERS = {  # the file's content as it should be, its reader, and what that raises
    "trace": (trace, diagnose, ValueError),
    "observed": (observed, read_observation, ValueError),
    "guarded": (guarded, compare_with_guarded, CannotGuard),
    "case": (case, read_as_case, WrongCase),
    "config": (config, plan_of_config, ValueError),
    "notebook": (notebook, read_as_notebook, ()),
    "record": (record, store.read_rows, RecordError),
    "tar": (tar, read_as_tar, ValueError),
}


def replaced(value, draw):
    """A value of JSON in which something is another: itself, or what is somewhere in it."""
    inner = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not inner or draw(st.integers(0, 5)) == 0:
        return draw(WILD)
    at = draw(st.sampled_from(inner))
    items = dict(value) if isinstance(value, dict) else list(value)
    items[at] = replaced(items[at], draw)
    return items


def broken(text, draw):
    if text.startswith("{") and draw(st.integers(0, 2)):
        return json.dumps(replaced(json.loads(text), draw))
    at, other = draw(st.integers(0, len(text))), draw(st.sampled_from(["", "\0", "é", '"', "[" * 3000, "9" * 400, "-"]))
    return text[:at] + other + draw(st.sampled_from(["", text[at:], text[at + 1 :]]))


def test_a_wrong_word_of_a_case_is_told_in_short(tmp_path):
    (tmp_path / "case.toml").write_text(case(tmp_path).replace("bitwise", "[" * 3000))
    with pytest.raises(WrongCase, match="is none of bitwise") as error:
        read_case(tmp_path)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("name", READERS)
@settings(
    deadline=None, max_examples=100, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data())
def test_a_broken_file_is_read_or_refused_in_one_line(name, data, tmp_path_factory):
    whole, reader, refusal = READERS[name]
    folder: Path = tmp_path_factory.mktemp(name)
    text = broken(whole(folder), data.draw)
    names = {file.name for file in folder.iterdir()} | {"file"}
    (folder / "file").write_bytes(text.encode("latin-1" if name == "tar" else "utf-8", "replace"))
    try:
        reader(folder / "file")
    except refusal as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        assert len([*folder.iterdir()]) == len(names)  # nothing is written
