"""Two tiny cases judged: what is faster and the same gets its score, and each way to cheat is seen for what it is."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.commands import main
from helpers.lab import estimate
from helpers.lab.trials import programs
from helpers.refereeing import audit, cases, judging, score
from helpers.trying import search, sides

CASES = Path(__file__).resolve().parents[2] / "data" / "cases"
MATRIX = cases.read_case(CASES / "tiny_matrix")
STEP = "    optimizer.step()\n"
LOSS = "    loss = nn.functional.cross_entropy(logits, y)\n"
# name: what is replaced in the script, by what, and the rule that it breaks
CHEATS = {
    "fewer steps": ("range(steps)", "range(steps // 2)", "steps in place of"),
    "fewer samples": ("    logits = ", "    x, y = x[:64], y[:64]\n    logits = ", "rows in place of"),
    "another seed with smaller batches": ("(128,))\n    x, y", "(64,))\n    x, y", "rows in place of"),
    "a smaller model": (
        "nn.Linear(32, 64), nn.ReLU(), nn.Linear(64",
        "nn.Linear(32, 8), nn.ReLU(), nn.Linear(8",
        "para",
    ),
    "no evaluation, its number printed": (
        "val = nn.functional.cross_entropy(model(held_out), their_labels)",
        "val = [1.398725, 1.397210, 1.399545, 1.402013][step // 10]",
        "eval rows in place of",
    ),
    "a loss that trains nothing": (LOSS, f"{LOSS}    loss = loss.detach() + 0 * logits.sum()\n", "losses different"),
    "a clock of its own": ("import sys\n", "import sys\nimport time\n\ntime.perf_counter = lambda: 0.0\n", "patched"),
    "another backward of torch": (
        "data, labels =",
        "torch.Tensor.backward = lambda loss: torch.autograd.backward(loss)\ndata, labels =",
        "patched: backward",
    ),
    "a file of the case written": ("steps = ", 'open("script.py", "a").write("#")\nsteps = ', "files of the case"),
    "a process in the background": (
        "import sys\n",
        'import sys\nimport subprocess\n\nsubprocess.Popen(["sleep", "60"], start_new_session=True)\n',
        "work left in the background",
    ),
    "a thread in the background": (
        "import sys\n",
        "import sys\nimport threading\n\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
        "a thread left",
    ),
    "another training after the first steps": (STEP, f"    if step < 30:\n    {STEP}", "losses"),
    "an output of its own": ('"w") as file:\n    ', '"w") as file:\n    matrix += 1\n    ', "matrix.json differs"),
}


@pytest.fixture(scope="module")
def judged():
    """What each script breaks, the runs two at a time, and the case's runs that they are compared with."""

    def edited(name: str) -> str:
        before, after, _ = CHEATS[name]
        assert before in MATRIX.script
        return MATRIX.script.replace(before, after)

    with judging.workspace() as new, ThreadPoolExecutor(3) as threads:
        known = threads.submit(judging.runs, MATRIX)
        runs = {name: MATRIX.prepare(edited(name), new()) for name in CHEATS}
        audits = dict(zip(runs, threads.map(lambda script: audit.audit(MATRIX, script), runs.values()), strict=True))
        return known.result(), {name: judging.broken_rules(MATRIX, known.result(), run) for name, run in audits.items()}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_another_training(judged, name):
    assert CHEATS[name][2] in "; ".join(judged[1][name])


def test_the_reference_and_the_original_break_no_rule(judged):
    known, _ = judged
    assert judging.broken_rules(MATRIX, known, known.reference) == []
    assert judging.broken_rules(MATRIX, known, known.base) == []
    assert judging.broken_rules(MATRIX, known, known.twin) != []  # bitwise is asked for
    assert known.base.rows == 40 * 128 and len(known.base.numbers) == 4


def test_a_script_that_names_the_referee_or_a_patch_of_other_files_is_refused(tmp_path):
    (tmp_path / "tiny_matrix.py").write_text("import dlspeed\n" + MATRIX.script)
    with pytest.raises(cases.Refused, match="dlspeed"):
        cases.submitted(MATRIX, tmp_path, lambda: tmp_path / "new")
    (tmp_path / "tiny_matrix.py").unlink()
    (tmp_path / "tiny_matrix.patch").write_text("--- /dev/null\n+++ b/torch.py\n@@ -0,0 +1 @@\n+fast = True\n")
    with pytest.raises(cases.Refused, match=r"changes torch\.py"):
        cases.submitted(MATRIX, tmp_path, lambda: tmp_path / "new")


def test_a_submission_is_judged_once_and_its_score_is_that_of_the_reference(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sides, "TURN_S", 0.05)
    monkeypatch.setattr(search, "OBSERVED_S", 0.5)
    monkeypatch.setattr(search, "LEAST_STEPS", 8)
    monkeypatch.setattr(sides, "MOST_LOOKS", 0)
    monkeypatch.setattr(programs, "LEAST_PAIRS", 2)
    monkeypatch.setattr(estimate, "LEAST_PAIRS", 2)
    for name in ("tiny_matrix", "tiny_graph"):
        shutil.copytree(CASES / name, tmp_path / "cases" / name)
    mine = tmp_path / "mine"
    mine.mkdir()
    shutil.copy(CASES / "tiny_graph" / cases.FIX, mine / "tiny_graph.patch")
    command = ["referee", "--json", "--seconds", "1", str(tmp_path / "cases"), str(mine)]
    assert main([*command, "--page", str(tmp_path / "page.html")]) == 0
    first = json.loads(capsys.readouterr().out)
    graph, matrix = first["cases"]
    assert graph["score"] == 1 and graph["low"] > 1 and graph["losses"].startswith("within seeds")
    assert matrix["score"] == 0 and not matrix["changed"]
    assert first["score"] == 0.5 and first["low"] == 0 and first["high"] >= 1
    assert "tiny_graph" in (tmp_path / "page.html").read_text()
    monkeypatch.setattr(judging, "judge", None)  # all of it is known
    assert main(command) == 0 and json.loads(capsys.readouterr().out) == first


def test_a_score_is_the_share_of_the_references_logarithm():
    row = {"changed": True, "broken": [], "note": "", "speedup": 2.0, "reference": {"speedup": 4.0}}
    assert score.score(row) == pytest.approx(0.5)
    assert score.score(row | {"note": "a whole run takes longer"}) == 0
    assert score.score(row | {"broken": ["losses"]}) == -1
    assert score.score(row | {"speedup": 0.01}) == -1
    assert score.score(row | {"changed": False}) == 0
