"""Two tiny cases judged: what is faster and the same gets its score, and each way to cheat is seen for what it is."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.cli import main
from helpers.refereeing import audit, cases, judging, score
from helpers.trying import search, sides

CASES = Path(__file__).resolve().parents[2] / "data" / "cases"
MATRIX = cases.read_case(CASES / "tiny_matrix")
# Rounds in another place than the case, whose own fix is exact
ROUNDED = {
    "fp64": (
        "loss = nn.functional.cross_entropy(logits, y)",
        "loss = nn.functional.cross_entropy(logits.double(), y).float()",
        "",
    )
}
STEP = "    optimizer.step()\n"
LOSS = "    loss = nn.functional.cross_entropy(logits, y)\n"
# Of each script: what is replaced by what, and the rule that it breaks. What is seen apart is in one script.
CHEATS = {
    "fewer": {
        "fewer steps": ("range(steps)", "range(steps - 10)", "steps in place of"),
        "fewer samples": ("    logits = ", "    x, y = x[:64], y[:64]\n    logits = ", "    rows in place of"),
        "a smaller model": (
            "32, 64), nn.ReLU(), nn.Linear(64",
            "32, 8), nn.ReLU(), nn.Linear(8",
            "parameters in place",
        ),
        "evaluations left out": ("step % 10 == 9", "step % 20 == 19", "evaluations in place of"),
    },
    "another": {
        "a seed that makes smaller batches": ("manual_seed(0)", "manual_seed(5)", "losses different"),
        "its batches": ("(512,))\n    x, y", "(int(torch.randint(32, 64, ())),))\n    x, y", "rows in place of"),
        "a loss from a list": (LOSS, f"{LOSS}    loss = loss.detach() + 0 * logits.sum()\n", "the parameters move"),
        "a validation loss from a list": (
            "val = nn.functional.cross_entropy(model(held_out), their_labels)",
            "val = [1.398725, 1.397210, 1.399545, 1.402013][step // 10]",
            "eval rows in place of",
        ),
    },
    "later": {"another training after the first steps": (STEP, f"    if step < 30:\n    {STEP}", "the parameters")},
    "around": {
        "a clock": ("steps = ", "import time\ntime.perf_counter = lambda: 0.0\nsteps = ", "patched: perf_counter"),
        "torch": ("data, labels =", "torch.nn.functional.mse_loss = print\ndata, labels =", "mse_loss"),
        "a file of the case": ("held_out,", 'open("script.py", "a").write("#")\nheld_out,', "files of the case"),
        "a process": ("model = ", 'import os\nos.system("sleep 60 &")\nmodel = ', "work left in the background"),
        "a thread": (
            "optimizer = ",
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\noptimizer = ",
            "a thread left running",
        ),
        "an output": ('"w") as file:\n', '"w") as file:\n    matrix += 1\n', "matrix.json differs"),
    },
}


@pytest.fixture(scope="module")
def known():
    return judging.runs(MATRIX)


def broken(known, *edits: dict) -> list[list[str]]:
    """What the case's script breaks with each of these edits; two run at a time."""
    with judging.workspace() as new, ThreadPoolExecutor(2) as threads:
        scripts = []
        for edit in edits:
            script = MATRIX.script
            for before, after, _ in edit.values():
                assert before in script
                script = script.replace(before, after)
            scripts.append(MATRIX.prepare(script, new()))
        audits = threads.map(lambda script: audit.audit(MATRIX, script), scripts)
        return [judging.broken_rules(MATRIX, known, run) for run in audits]


@pytest.fixture(scope="module")
def judged(known):
    return dict(zip(CHEATS, broken(known, *CHEATS.values()), strict=True))


@pytest.mark.long
@pytest.mark.parametrize(("script", "cheat"), [(script, cheat) for script in CHEATS for cheat in CHEATS[script]])
def test_a_cheat_is_named(judged, script, cheat):
    assert CHEATS[script][cheat][2].strip() in "; ".join(judged[script])


def test_the_original_the_reference_and_what_only_rounds_break_no_rule(known):
    assert judging.broken_rules(MATRIX, known, known.reference) == [] == broken(known, ROUNDED)[0]
    assert judging.broken_rules(MATRIX, known, known.base) == []
    assert known.base.rows == 40 * 512 and known.base.eval_rows == 4 * 128 and len(known.base.numbers) == 4


def test_a_script_that_names_the_referee_or_a_patch_of_other_files_is_refused(tmp_path):
    (tmp_path / "tiny_matrix.py").write_text("import dlspeed\n" + MATRIX.script)
    with pytest.raises(cases.Refused, match="dlspeed"):
        cases.submitted(MATRIX, tmp_path, lambda: tmp_path / "new")
    (tmp_path / "tiny_matrix.py").unlink()
    (tmp_path / "tiny_matrix.patch").write_text("--- /dev/null\n+++ b/torch.py\n@@ -0,0 +1 @@\n+fast = True\n")
    with pytest.raises(cases.Refused, match=r"changes torch\.py"):
        cases.submitted(MATRIX, tmp_path, lambda: tmp_path / "new")
    (tmp_path / "tiny_matrix.patch").write_text("# shell: A=1 python …\n")  # as `try` writes
    assert cases.submitted(MATRIX, tmp_path, lambda: tmp_path / "new") == MATRIX.script


def test_a_submission_is_judged_once_and_the_references_score_is_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sides, "TURN_S", 0.05)
    monkeypatch.setattr(search, "OBSERVED_S", 0.5)
    monkeypatch.setattr(search, "LEAST_STEPS", 8)
    monkeypatch.setattr(sides, "MOST_LOOKS", 0)
    mine = tmp_path / "mine"
    mine.mkdir()
    shutil.copy(MATRIX.folder / cases.FIX, mine / "tiny_matrix.patch")
    graph = cases.read_case(CASES / "tiny_graph")
    results = score.Results(judging.judge_all([graph, MATRIX], mine, 1.0, print))
    unchanged, reference = results.rows
    assert not unchanged["changed"] and score.score(unchanged) == 0
    assert reference["speedup"] > 1 and score.score(reference) == 1 and results.mean == 0.5
    assert results.rows[1]["losses"].startswith("bitwise equal")
    monkeypatch.setattr(judging, "audit", None)  # what is known isn't run again
    monkeypatch.setattr(judging, "try_edited", None)
    capsys.readouterr()
    page = tmp_path / "page.html"
    command = ["referee", "--json", "--seconds", "1", "--page", str(page), str(MATRIX.folder), str(mine)]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["cases"][0]["speedup"] == reference["speedup"]
    assert "tiny_matrix" in page.read_text()


def test_a_score_is_the_share_of_the_references_logarithm():
    row = {"changed": True, "broken": [], "note": "", "speedup": 2.0, "reference": {"speedup": 4.0}}
    assert score.score(row) == pytest.approx(0.5)
    assert score.score(row | {"note": "a whole run takes longer"}) == 0
    assert score.score(row | {"broken": ["losses"]}) == -1
    assert score.score(row | {"speedup": 0.01}) == -1
    assert score.score(row | {"changed": False}) == 0
