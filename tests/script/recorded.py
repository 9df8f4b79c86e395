"""Scripts recorded for tests, and what the profiles hold."""

import gzip
import json
from pathlib import Path

from helpers.script.recording import record_script
from helpers.script.windows import Plan


def watch(script, arguments=(), **plan):
    return record_script(script, arguments, Plan(**plan))


def read(path):
    return json.loads(gzip.decompress(Path(path).read_bytes()))


def in_steps(path):
    """Of each recorded iteration the optimizers' steps and the backward passes that it holds whole."""
    events = [e for e in read(path)["traceEvents"] if e.get("ph") == "X"]
    marks = sorted((e for e in events if e["name"].startswith("ProfilerStep#")), key=lambda e: e["ts"])
    counts = []
    for mark in marks:
        begin, end = mark["ts"], mark["ts"] + mark["dur"]
        inside = [e["name"] for e in events if begin <= e["ts"] and e["ts"] + e["dur"] <= end]
        steps = sum(name.startswith("Optimizer.step#") for name in inside)
        counts.append((steps, inside.count("autograd::engine::evaluate_function: MeanBackward0")))
    return counts
