"""What other profilers say of the reports' scripts: how their answers are read, judged and counted."""

import signal

import pandas as pd
import pytest

from helpers.chapters import tool
from helpers.chapters.tool.profilers import (
    BEFORE,
    CAUSES,
    CUMULATIVE,
    MODELS,
    OURS,
    OWN,
    REPORTS,
    SCALENE,
    TRACEML,
    judged,
    lines_of_samples,
    run_for,
    with_traced_step,
)

PRESTO = "presto_worldcereal_9"
CAUSE, *_ = LINES = CAUSES[PRESTO]["lines"]


def test_an_answer_is_right_by_the_place_of_a_line_that_a_person_would_edit():
    other, right = (f"{PRESTO}.py:1 import argparse", 0.4), (f"Python loop {PRESTO}.py:{CAUSE} a = row[name]", 0.3)
    assert judged(PRESTO, LINES, [right, other])["place"] == 1
    assert judged(PRESTO, LINES, [other, right]) == {"answer": other[0], "share": 0.4, "place": 2}
    assert judged(PRESTO, LINES, [other, other, other, right])["place"] is None
    assert judged(PRESTO, LINES, [(f"{PRESTO}.py:{CAUSE}0", None)])["place"] is None
    assert judged(PRESTO, LINES, []) == {"answer": "nothing", "share": None, "place": None}


def test_samples_are_counted_where_they_end_and_where_they_pass():
    """A third of the samples ends in a library that line 5 calls; line 9 starts the training."""
    begin = f'process 1:"python {PRESTO}.py";<module> ({PRESTO}.py:9);'
    stacks = [f"{begin}step ({PRESTO}.py:5);linear (torch/nn.py:3) 4", f"{begin}step ({PRESTO}.py:5) 2"]
    stacks += [f"{begin}load ({PRESTO}.py:7) 5", "wait (threading.py:2) 1"]
    stacks += [f"<module> ({PRESTO}.py:4);_find_and_load (<frozen importlib._bootstrap>:1) 90"]
    shares = lines_of_samples("\n".join(stacks), PRESTO)
    assert shares[OWN] == [(f"{PRESTO}.py:7", 5 / 12), (f"{PRESTO}.py:5", 2 / 12)]
    assert shares[CUMULATIVE] == [(f"{PRESTO}.py:5", 6 / 12), (f"{PRESTO}.py:7", 5 / 12)]


@pytest.mark.parametrize("script", CAUSES)
def test_the_lines_of_traceml_are_put_around_the_step_of_each_script(script):
    source = (REPORTS / f"{script}.py").read_text()
    traced = with_traced_step(source, MODELS.get(script))
    compile(traced, script, "exec")
    added = [line.strip() for line in traced.splitlines() if "traceml_ai" in line]
    assert len(added) == 3 and added[-1].startswith("with traceml_ai.trace_step(")
    assert [line.strip() for line in traced.splitlines() if "traceml_ai" not in line] == [
        line.strip() for line in source.splitlines()
    ]


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN], ids=["typed", "background"])
def test_a_profiler_is_interrupted_like_by_ctrl_c_and_ends(tmp_path, handler):
    before = signal.signal(signal.SIGINT, handler)
    command = ["sh", "-c", "trap 'echo interrupted; kill $!; exit' INT; sleep 30 & wait"]
    halfway = []
    try:
        run_for(1, command, tmp_path, halfway.append)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(halfway) == 1
    assert (tmp_path / "printed.txt").read_text() == "interrupted\n"


def test_places_are_counted_by_profiler():
    row = {"script": PRESTO, "profiler": "py-spy", "package": "py-spy 0.4.3", "share": 0.5}
    rows = [row | {"by": OWN, "answer": f"{PRESTO}.py:56", "place": 1}]
    rows += [row | {"by": CUMULATIVE, "answer": f"{PRESTO}.py:1", "place": 3}]
    rows += [row | {"by": SCALENE, "answer": f"{PRESTO}.py:2", "place": None, "package": "scalene 2.4.0"}]
    rows += [row | {"by": OURS, "answer": f"costly line {PRESTO}.py:56 x = 1", "place": 1, "package": "torch"}]
    rows += [row | {"by": TRACEML, "answer": "input-bound", "place": None}]
    named = tool.profilers.of_rows(pd.DataFrame(rows))
    of_one = {by: text[:6] for by, text in named.first.items() if by != TRACEML}
    assert of_one == {BEFORE: "1 of 1", OWN: "1 of 1", CUMULATIVE: "0 of 1", SCALENE: "0 of 1", OURS: "1 of 1"}
    assert [*named.table.iloc[0]] == [PRESTO, "1", "1", "1", "3", "–", "input-bound"]
    assert named.packages == "py-spy 0.4.3, scalene 2.4.0" and named.count.value == 1


def test_without_our_first_go_nothing_is_said_of_it(monkeypatch, tmp_path):
    monkeypatch.setitem(judged.__globals__, "FIRST_GO", tmp_path / "none.csv")
    row = {"script": PRESTO, "by": OWN, "answer": f"{PRESTO}.py:56", "place": 1, "package": "py-spy 0.4.3"}
    assert "not measured" in tool.profilers.of_rows(pd.DataFrame([row])).first[BEFORE]
