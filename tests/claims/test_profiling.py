"""Chapter 3's numbers, from rows made by hand."""

import json

import numpy as np
import pandas as pd

from helpers.claims import profiling
from helpers.claims.profiling import strangers


def promise(pipeline, faults, fix, finding, predicted, gained, first, noise=0.01):
    row = {"pipeline": pipeline, "faults": faults, "fix": fix, "finding": finding, "step_ms": 100.0}
    row |= {"promised_share": predicted, "gained_share": gained}
    return row | {"noise_share": noise, "first_finding": first}


PROMISES = pd.DataFrame(
    [
        promise("vit", "bf16", "bf16", "fp32 products", 0.50, 0.48, "fp32 products"),
        promise("vit", "bf16 + qkv", "bf16", "fp32 products", 0.40, 0.50, "fp32 products"),
        promise("vit", "bf16 + qkv", "qkv", "separate products", 0.10, 0.06, "fp32 products"),
        promise("gpt", "loss + adam", "loss", "loss in parts", 0.10, 0.11, "unfused", noise=0.2),
        promise("gpt", "loss + adam", "adam", "unfused", 0.12, 0.10, "unfused", noise=0.2),
        promise("gpt", "padding", "padding", None, 0.0, 0.6, "fp32 products"),
    ]
)


def test_promises_are_judged_by_their_errors_and_by_the_order_in_pairs():
    promises = profiling.predicted(PROMISES)
    assert float(promises.fixes) == 5
    assert f"{promises.median_error}" == "2.0%"
    assert float(promises.beyond) == 1
    assert (float(promises.pairs), float(promises.pairs_right)) == (2, 1)
    assert (float(promises.clear_pairs), float(promises.clear_right)) == (1, 1)  # the other pair differs by noise
    assert promises.worst == "bf16 in the ViT (bf16 + qkv)"
    assert promises.hidden["fix"].tolist() == ["padding"]


def test_findings_are_counted_by_loop_and_nothing_is_none():
    rows = pd.DataFrame(
        {
            "pipeline": ["vit", "vit", "vit", "gpt"],
            "variant": ["slow", "slow", "fixed", "slow"],
            "rank": [0, 1, 0, 0],
            "finding": ["loader", "fp32 products", "nothing", "padding"],
            "where": ["a/b.py:3 in f", None, None, None],
            "gain_ms": [5.0, 2.0, None, 1.0],
            "gain_share": [0.5, 0.2, None, 0.1],
            "evidence": ["waits", "slow", None, "pads"],
            "commit": "0123456789",
        }
    )
    result = profiling.diagnose(rows)
    assert [float(result.vit.slow), float(result.vit.fixed), float(result.gpt.slow)] == [2, 0, 1]
    assert not result.gpt.fixed.measured
    assert result.largest["source line"].tolist() == ["b.py:3", "", ""]


def fix(name, us, width=0.1):
    row = {"fix": name, "us_per_target": us, "baseline_us_per_target": 100.0, "ratio": us / 100, "pairs": 7}
    return row | {"low": us / 100 - width, "high": us / 100 + width}


def test_fixes_are_ordered_by_effect():
    fixes = profiling.vit_fixes(pd.DataFrame([fix("workers", 99.0), fix("decode_once", 50.0), fix("all", 25.0)]))
    assert fixes.table["fix"].tolist() == ["decode_once", "workers", "all"]
    assert (fixes.largest, f"{fixes.largest_gain:1}") == ("decode_once", "2.0× (1.7 to 2.5, 7 pairs)")
    assert f"{fixes.together:brief}" == "4.0×"


def test_fixes_of_a_gpu_that_measured_one():
    fixes = profiling.gpt_fixes(pd.DataFrame([fix("packed", 50.0)]))
    assert fixes.second == "" and not fixes.together.measured


def test_a_loop_that_is_not_measured_is_a_number_that_says_so():
    rows = pd.DataFrame(
        {"pipeline": ["vit", "vit"], "variant": ["slow", "fixed"], "seed": [0, 0], "epochs": [3, 3]}
        | {"epoch_s": [8.0, 2.0], "train_loss": [1.0, 1.1], "validation_accuracy": [0.4, 0.5]}
        | {"constant_accuracy": [0.25, 0.25], "source": ["some photos", "some photos"]}
    )
    runs = profiling.whole_runs(rows)
    assert runs.data == "some photos"
    assert runs.vit.speedup.at_least(3).outcome == "holds"
    assert runs.gpt.speedup.at_least(3).outcome == "not measured"


def test_trials_of_a_program_against_itself_are_counted():
    rows = pd.DataFrame(
        [
            {"trial_s": 20.0, "ratio": 1.01, "low": 0.99, "high": 1.03, "verdict": "no difference above 4 %"},
            {"trial_s": 20.0, "ratio": 1.02, "low": 1.01, "high": 1.03, "verdict": "no difference above 4 %"},
            {"trial_s": 20.0, "ratio": 0.94, "low": 0.92, "high": 0.96, "verdict": "faster"},
        ]
    )
    nulls = profiling.nulls(
        rows.assign(others=["bursts", "bursts", "quiet"], allocator="kept", median_ms=[9, 9.1, 8.9], baseline_ms=10)
    )
    assert (f"{nulls.trials}", f"{nulls.wrong:brief}", f"{nulls.excluded:brief}") == ("3", "33%", "67%")
    assert nulls.table[["trials", "verdicts", "intervals without 1"]].values.tolist() == [[2, 0, 1], [1, 1, 1]]
    assert nulls.wrong.at_most(0.3).outcome == "undecided" and nulls.leaning.high < 1


def test_a_slowdown_is_found_the_oftener_the_larger_it_is_and_the_longer_the_trial():
    pairs = " ".join(map(str, np.random.default_rng(0).normal(0, 0.03, 40).round(4)))
    null = {"training": "mlp", "slowdown": 0.0, "verdict": "none above 3 %", "log_ratios": f"{pairs}; {pairs}"}
    numbers = {"median_ms": 5.0, "ratio": 1.0, "low": 0.99, "high": 1.01, "pairs": 80, "starts": 2}
    rows = pd.DataFrame([null | numbers, null | numbers | {"slowdown": 0.05, "verdict": "slower"}])
    slowdowns = profiling.slowdowns(rows)
    found = slowdowns.curve.pivot(index="slowdown", columns="seconds", values="found").to_numpy()
    assert found[0, 0] < 0.1 and found[-1, -1] == 1 and (found[3:, -1] > 0.95).all()
    assert slowdowns.curve["wrong_sign"].max() <= 0.01
    assert f"{slowdowns.found:brief}" == "100%" and slowdowns.table["training"].tolist() == ["mlp"]


def test_right_answers_promises_and_alarms_of_the_open_set_are_counted():
    row = {"first": "padding train.py:3", "right": True, "place": 1, "promised": 0.5, "gained": 0.4, "alarm": 0.01}
    row |= {"alarm_tried": None, "seconds_to_answer": 20.0, "apart": False, "line_right": True}
    row |= {"told": None}
    wrong = row | {"right": False, "place": 2, "apart": True, "promised": None, "alarm": 0.2}
    confirmed = row | {"loop": "c", "alarm": 0.4, "alarm_tried": 0.3}
    found = profiling.loops(pd.DataFrame([row | {"loop": "a"}, wrong | {"loop": "b"}, confirmed]))
    assert (f"{found.right:brief}", f"{found.right_apart:brief}", f"{found.alarms:brief}") == ("67%", "0%", "33%")
    assert f"{found.right}" == "67% (21 to 94)" and not found.first_line.measured  # none is of data/loops
    assert found.fp32.value == 1
    assert f"{found.median_error}" == "10%"
    of_a_file = pd.DataFrame([row | {"loop": "a"}, wrong | {"loop": "b"}]).astype({"right": str, "apart": str})
    assert f"{profiling.loops(of_a_file).right:brief}" == "50%"


def test_a_profiler_is_right_where_its_first_line_is_the_causes_and_the_baselines_are_read():
    rows = pd.DataFrame({"tool": ["py-spy"] * 4, "right": [True, "True", "False", None]})
    share = profiling.peers(rows).share
    assert f"{share['py-spy']:brief}" == "50%" and not share["scalene"].measured
    judged = profiling.baselines()
    assert (judged.scores["nothing"].value, judged.scores["reference"].value) == (0, 1) and len(judged.table) == 12


def test_a_gpus_loops_are_counted_with_and_without_what_their_fixes_gain():
    row = {"loop": "a", "first": "fp32 products a.py:3", "right": True, "place": 1, "promised": 0.5, "predicted": 0.4}
    wrong = row | {"loop": "b", "right": False, "place": None, "promised": None, "predicted": 0.6}
    rows = pd.DataFrame([row, wrong])
    pair = {"by": "hand", "change": "--fixed", "gained": 0.45, "gained_low": 0.4, "gained_high": 0.5}
    from_outside = pair | {"loop": "b", "by": "try", "change": "nothing", "gained": 0.0, "gained_low": None}
    both = profiling.gpu_loops(rows, pd.DataFrame([pair | {"loop": "a"}, from_outside | {"gained_high": None}]))
    assert both.table["loop"].tolist() == ["b", "a"]  # the dearest first
    assert both.table["gained by the fix"].tolist() == ["", "45% (40 to 50)"]
    assert both.table["by try from outside"].tolist() == ["nothing: 0%", ""]
    assert f"{both.right:brief}" == "50%" and f"{both.median_error}" == "5%"
    alone = profiling.gpu_loops(rows, pd.DataFrame())
    assert f"{alone.right:brief}" == "50%" and not alone.median_error.measured


def test_what_the_command_printed_keeps_its_lines_and_fits_a_page():
    text = "compute\n\n  loader  0.1%\n" + "a word " * 40
    row = {"first": "", "right": True, "place": 1, "promised": 0.5, "gained": 0.4, "alarm": None, "alarm_tried": None}
    row |= {"apart": False, "line_right": True, "seconds_to_answer": 20.0, "loop": "a", "told": json.dumps(text)}
    told = profiling.loops(pd.DataFrame([row, row | {"loop": "b", "told": None}])).told
    assert list(told) == ["a"] and told["a"].startswith("compute\n\n  loader  0.1%\na word")
    assert max(map(len, told["a"].splitlines())) <= strangers.PAGE
    begun_with_a_path = pd.DataFrame([row | {"told": json.dumps("/home/me/slow.py gpt: 3 ms a step\n a/b")}])
    assert profiling.loops(begun_with_a_path).told["a"] == "slow.py gpt: 3 ms a step\n a/b"


def test_changes_from_outside_are_held_against_those_by_hand():
    row = {"change": "optimizer", "losses": "bitwise equal", "tried_low": 0.18, "tried_high": 0.22, "tried": 0.2}
    row["told"] = None
    hands = {"a": (0.25, 0.24, 0.26), "b": (0.4, 0.35, 0.45), "c": (None, None, None), "vit": (0.25, 0.24, 0.26)}
    names = ("by_hand", "by_hand_low", "by_hand_high")
    rows = pd.DataFrame(
        [row | {"script": script} | dict(zip(names, hand, strict=True)) for script, hand in hands.items()]
    )
    loops = {"loop": ["a", "b", "d"], "promised": [0.3, None, 0.5]}
    found = profiling.tried(rows, pd.DataFrame(loops))
    assert (found.equal.value, found.count.value) == (1, 2)
    assert [x.measured for x in found.table["promised"]] == [True, False, False, False]
    assert list(found.table["by hand"]) == ["25% (24 to 26)", "40% (35 to 45)", "", "25% (24 to 26)"]
