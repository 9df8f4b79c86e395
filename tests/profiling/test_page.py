import gzip
import json
import re
from dataclasses import replace
from decimal import Decimal
from html import unescape
from itertools import accumulate, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiling.made_up import LAUNCHES, diagnosis
from profiling.synthetic import Synthetic, parse

from helpers.__main__ import main
from helpers.profiling import diagnose, trace_file
from helpers.profiling.page import MARK, page
from helpers.profiling.perfetto import events, marked
from helpers.profiling.read_trace import read_trace
from helpers.profiling.trace import Note

decode = trace_file._decode
HOSTILE = """</title></svg><script>alert("1 & 2")</script><img src=x onerror='a()'>"""


def steps(name="aten::mm", count=3):
    made = Synthetic()
    for _ in range(2):
        with made.step():
            for _ in range(count):
                made.op(name, kernel=f"kernel<{name}>", us=50.0)
    return made


def svg(html):
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", html, re.DOTALL)[0])


def titles(html):
    return [rect.find("title").text for rect in svg(html).iter("rect")]


def marks(html):
    """(x, width) of the findings' spans."""
    groups = [group for group in svg(html).iter("g") if group.get("fill") == MARK]
    return [(float(rect.get("x")), float(rect.get("width"))) for group in groups for rect in group]


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


def test_half_a_character_in_a_name_can_be_written():
    assert "a?b" in page(diagnosis(verdict="a\ud800b"), parse(steps().events)).encode().decode()


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
    assert sum(int(m[1]) if (m := re.match(r"(\d+) spans", title)) else 1 for title in streams) == 20_000


def test_spans_of_a_finding_are_marked_where_they_are_in_the_last_step():
    trace = parse(steps(count=20).events)
    begin, end = trace.steps[-1].begin, max(e.end for e in trace.device)
    before, middle = (0.0, begin - 1), ((begin + end) / 2, end)
    html = page(diagnosis(findings=(replace(LAUNCHES, spans=[before, middle]),)), trace)
    ((x, width),) = marks(html)
    assert x == pytest.approx(170 + 490, abs=1)
    assert width == pytest.approx(490, abs=1)
    assert not marks(page(diagnosis(findings=(replace(LAUNCHES, spans=[before]),)), trace))


def test_a_step_without_events_is_said():
    made = steps()
    with made.step():
        pass
    assert "no events to draw" in page(diagnosis(), parse(made.events))


def written(made, path):
    content = {"schemaVersion": 1, "traceEvents": made.events, "traceName": "trace.json"}
    data = json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return content


def unpacked(path):
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def check_slices(events):
    """On each track a slice begins where the one before has ended, or later, as the file says it in decimals."""
    ends = {}
    for event in (e for e in events if e["ph"] == "X"):
        begin = Decimal(str(event["ts"]))
        assert event["dur"] >= 0
        assert begin >= ends.get(event["tid"], 0)
        ends[event["tid"]] = begin + Decimal(str(event["dur"]))


def marked_events(source, path, finding=LAUNCHES):
    trace = read_trace(source)
    spans = [(e.begin, e.end) for e in trace.device]
    marked(source, diagnosis(findings=(replace(finding, spans=spans),)), trace, path)
    content = json.loads(unpacked(path))
    events = content if isinstance(content, list) else content["traceEvents"]
    ours = [e for e in events if e["pid"] == 50_000_000]
    return trace, content, [e for e in events if e not in ours], ours


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_marked_profile_is_the_profile_and_a_process_with_the_findings(suffix, tmp_path):
    source = tmp_path / f"profile{suffix}"
    content = written(steps(), source)
    trace, after, theirs, ours = marked_events(source, tmp_path / f"marked{suffix}")
    assert theirs == content["traceEvents"]
    assert after["traceName"] == "trace.json"
    check_slices(ours)
    names = {e["tid"]: e["args"]["name"] for e in ours if e["name"] == "thread_name"}
    assert list(names.values()) == ["device", "1. launch-bound loop"]
    slices = [e for e in ours if e["ph"] == "X" and names[e["tid"]] != "device"]
    assert [(e["ts"], e["ts"] + e["dur"]) for e in slices] == [(e.begin, e.end) for e in trace.device]
    assert slices[0]["args"]["where"] == LAUNCHES.where
    assert slices[0]["args"]["gain"] == "up to 40 ms a step (40%; upper bound)"


@given(start=st.sampled_from([0.0, 3.6e12, 1.7e15]), lengths=st.lists(st.floats(0, 50), min_size=2, max_size=20))
def test_adjoining_spans_do_not_overlap_in_nanoseconds(start, lengths):
    times = list(accumulate(lengths, initial=start))
    finding = replace(LAUNCHES, spans=list(pairwise(times)))
    made = [e for e in events(diagnosis(findings=(finding,)), parse(steps().events)) if e["name"] == LAUNCHES.finding]
    check_slices(made)


def test_a_bare_list_and_a_file_that_is_cut_off_are_marked_too(tmp_path):
    made = steps()
    (tmp_path / "bare.json").write_text(json.dumps(made.events))
    _, _, theirs, _ = marked_events(tmp_path / "bare.json", tmp_path / "marked.json")
    assert theirs == made.events
    whole = json.dumps({"traceEvents": made.events}).encode()
    for cut in (len(whole) - 40, len(whole) - 2, len(whole) // 2):
        (tmp_path / "cut.json").write_bytes(whole[:cut])
        _, _, theirs, _ = marked_events(tmp_path / "cut.json", tmp_path / "marked.json")
        assert theirs == made.events[: len(theirs)]
        assert len(theirs) >= whole[:cut].count(b'"ph"') - 2


@pytest.mark.parametrize("name", ["cpu_clean", "hta_minitoy_mi250", "tracelens_vllm_decode_graph_mi300x"])
def test_the_command_draws_and_marks_a_profile_that_it_parses_once(name, tmp_path, monkeypatch, capsys):
    source = Path(__file__).parent / "traces" / f"{name}.json.gz"
    written = [tmp_path / "page.html", tmp_path / "marked.json"]
    parsed = []
    monkeypatch.setattr(trace_file, "_decode", lambda *text: parsed.append(1) or decode(*text))
    assert main(["diagnose", str(source), "--html", str(written[0]), "--perfetto", str(written[1])]) == 0
    assert parsed == [1]
    assert capsys.readouterr().out == f"{diagnose(source)}\n"
    drawn = written[0].read_text()
    assert "no events to draw" in drawn or titles(drawn)
    theirs = json.loads(unpacked(source))["traceEvents"]
    ours = json.loads(written[1].read_bytes())["traceEvents"][: -len(theirs)]
    check_slices(ours)
    assert {e["args"]["name"] for e in ours if e["name"] == "process_name"} == {"diagnosis"}


def test_control_characters_of_a_name_are_not_in_the_page():
    trace = parse(steps("\x1b[31mred\x07\x9b").events)
    html = page(diagnosis(), trace)
    assert "[31mred" in html
    assert not set(html) & {"\x1b", "\x07", "\x9b"}
