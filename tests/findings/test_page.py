import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest
from findings.made_up import LAUNCHES, diagnosis
from findings.synthetic import Synthetic, parse

from helpers.cli import main
from helpers.findings.diagnose import diagnose
from helpers.findings.page import page
from helpers.findings.step_picture import MARK
from helpers.findings.trace import Note

HOSTILE = """</title></svg><script>alert("1 & 2")</script><img src=x onerror='a()'>"""


def steps(name="aten::mm", count=3):
    made = Synthetic()
    for _ in range(2):
        with made.step():
            for _ in range(count):
                made.op(name, kernel=f"kernel<{name}>", us=50.0)
    return made


def svg(html):
    return ElementTree.fromstring(re.search(r'<svg class="step".*</svg>', html, re.DOTALL)[0])


def titles(html):
    return [rect.find("title").text for rect in svg(html).iter("rect")]


def marks(html):
    """(x, width) of the findings' spans."""
    return [(float(r.get("x")), float(r.get("width"))) for r in svg(html).iter("rect") if r.get("fill") == MARK]


def test_names_in_a_profile_cannot_inject_markup():
    finding = replace(LAUNCHES, finding=HOSTILE, where=HOSTILE, evidence=HOSTILE, advice=HOSTILE, part=HOSTILE)
    trace = parse(steps(HOSTILE).events, deviceProperties=[{"name": HOSTILE}])
    begin = trace.steps[-1].begin
    hostile = diagnosis(
        verdict=HOSTILE,
        account={HOSTILE: 0.5, "idle": 0.5},
        idle={HOSTILE: 0.5},
        findings=(replace(finding, spans=[(begin, begin + 50)]),),
        notes=(Note(HOSTILE, HOSTILE),),
        source=HOSTILE,
    )
    html = page(hostile, trace)
    assert "<script" not in html and "<img" not in html
    assert HOSTILE in unescape(html)
    assert not re.search(r"https?:|url\(|@import", html.replace(HOSTILE, ""))


@pytest.mark.long
def test_20000_events_stay_below_2_mb_and_none_is_lost():
    made = Synthetic()
    with made.step():
        for number in range(20_000 // 8):
            for stream in range(8):
                begin = made.now + stream
                name = f"void at::native::vectorized_elementwise_kernel<{number}, {'float, ' * 20}>"
                made.write("kernel", name, begin, begin + number % 90, (0, stream), correlation=number)
            made.call("cudaLaunchKernel", 50.0, correlation=number)
    html = page(diagnosis(), parse(made.events))
    assert len(html) < 2e6
    streams = [title for title in titles(html) if "elementwise" in title]
    merged = [int(m[1]) for title in streams if (m := re.search(r", (\d+) shorter spans", title))]
    assert len(streams) + sum(merged) == 20_000


def test_options_stand_apart_below_the_faults():
    trace, option = parse(steps().events), replace(LAUNCHES, option=True)
    html = page(diagnosis(findings=(LAUNCHES, option)), trace)
    assert html.index("1. launch-bound") < html.index("What could be faster still") < html.index("2. launch-bound")
    assert "<h2>Findings" not in page(diagnosis(findings=(option,)), trace)


def test_spans_of_a_finding_are_marked_where_they_are_in_the_last_step():
    trace = parse(steps(count=20).events)
    begin, end = trace.steps[-1].begin, max(e.end for e in trace.device)
    before, middle = (0.0, begin - 1), ((begin + end) / 2, end)
    html = page(diagnosis(findings=(replace(LAUNCHES, spans=[before, middle]),)), trace)
    ((x, width),) = marks(html)
    assert x == pytest.approx(170 + 490, abs=1)
    assert width == pytest.approx(490, abs=1)
    assert not marks(page(diagnosis(findings=(replace(LAUNCHES, spans=[before]),)), trace))


def test_work_of_the_device_after_the_steps_end_is_told():
    assert "after the step's end, dashed" in page(diagnosis(), parse(steps().events))
    made = steps(count=0)
    with made.step():
        made.op("aten::mm", kernel="kernel", us=50.0, waits=True)
    assert "dashed" not in page(diagnosis(), parse(made.events))


def test_a_step_without_events_is_said():
    made = steps()
    with made.step():
        pass
    assert "no events to draw" in page(diagnosis(), parse(made.events))


def test_what_is_no_text_in_a_name_is_not_in_the_page():
    html = page(diagnosis(verdict="a\ud800b"), parse(steps("\x1b[31mred\x07\x9b").events))
    assert "a?b" in html and "[31mred" in html
    assert not set(html) & {"\x1b", "\x07", "\x9b"}


def test_the_command_prints_and_draws_a_profile(tmp_path, capsys):
    source = Path(__file__).parent / "traces/cpu_clean.json.gz"
    assert main(["diagnose", str(source), "--html", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"{diagnose(source)}\n"
    assert titles((tmp_path / "page.html").read_text())
