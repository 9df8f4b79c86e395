"""The numbers of the tool's own trials, from rows made by hand."""

import json

import pandas as pd

from helpers.chapters import tool
from helpers.chapters.tool.baselines import baselines
from helpers.chapters.tool.cases import PAGE


def test_right_answers_promises_and_alarms_of_the_open_set_are_counted():
    row = {"first": "padding train.py:3", "right": True, "place": 1, "promised": 0.5, "gained": 0.4, "alarm": 0.01}
    row |= {"alarm_tried": None, "seconds_to_answer": 20.0, "apart": False, "line_right": True}
    row |= {"told": None}
    wrong = row | {"right": False, "place": 2, "apart": True, "promised": None, "alarm": 0.2}
    confirmed = row | {"loop": "c", "alarm": 0.4, "alarm_tried": 0.3}
    found = tool.loops.of_rows(pd.DataFrame([row | {"loop": "a"}, wrong | {"loop": "b"}, confirmed]))
    assert (f"{found.right:brief}", f"{found.right_apart:brief}", f"{found.alarms:brief}") == ("67%", "0%", "33%")
    assert f"{found.right}" == "67% (21 to 94)" and not found.first_line.measured  # none is of data/loops
    assert f"{found.median_error}" == "10%" and float(found.beyond) == 0
    more = [row | {"loop": "a", "gained": 0.52}, row | {"loop": "b", "gained": 0.6}]
    exceeded = tool.loops.of_rows(pd.DataFrame(more))
    assert (float(exceeded.beyond), float(exceeded.far_beyond)) == (2, 1)
    of_a_file = pd.DataFrame([row | {"loop": "a"}, wrong | {"loop": "b"}]).astype({"right": str, "apart": str})
    assert f"{tool.loops.of_rows(of_a_file).right:brief}" == "50%"


def test_the_baselines_are_read():
    judged = baselines()
    assert (judged.scores["nothing"].value, judged.scores["reference"].value) == (0, 1)
    assert 0 < float(judged.helped) < float(judged.cases)


def test_what_the_command_printed_keeps_its_lines_and_fits_a_page():
    text = "compute\n\n  loader  0.1%\n" + "a word " * 40
    row = {"first": "", "right": True, "place": 1, "promised": 0.5, "gained": 0.4, "alarm": None, "alarm_tried": None}
    row |= {"apart": False, "line_right": True, "seconds_to_answer": 20.0, "loop": "a", "told": json.dumps(text)}
    told = tool.loops.of_rows(pd.DataFrame([row, row | {"loop": "b", "told": None}])).told
    assert list(told) == ["a"] and told["a"].startswith("compute\n\n  loader  0.1%\na word")
    assert max(map(len, told["a"].splitlines())) <= PAGE
    begun_with_a_path = pd.DataFrame([row | {"told": json.dumps("/home/me/slow.py gpt: 3 ms a step\n a/b")}])
    assert tool.loops.of_rows(begun_with_a_path).told["a"] == "slow.py gpt: 3 ms a step\n a/b"
