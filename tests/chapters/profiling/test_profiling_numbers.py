"""Chapter 3's numbers, from rows made by hand."""

import pandas as pd

from helpers.book.values import Number
from helpers.chapters import profiling
from helpers.chapters.profiling.diagnose import beside


def test_findings_are_counted_by_loop_and_nothing_is_none():
    rows = pd.DataFrame(
        {
            "pipeline": ["vit", "vit", "vit", "gpt"],
            "variant": ["slow", "slow", "fixed", "slow"],
            "rank": [0, 1, 0, 0],
            "finding": ["unaligned sizes", "fp32 products", "nothing", "padding"],
            "where": ["a/b.py:3 in f", None, None, None],
            "gain_ms": [5.0, 2.0, None, 1.0],
            "gain_share": [0.5, 0.2, None, 0.1],
            "evidence": ["waits", "slow", None, "pads"],
            "commit": "0123456789",
        }
    )
    result = profiling.diagnose.of_rows(rows)
    assert [float(result.vit.slow), float(result.vit.fixed), float(result.gpt.slow)] == [2, 0, 1]
    assert not result.gpt.fixed.measured
    alone = {"width_256": Number(1.25, "×", 1.2, 1.3, 8), "bf16": Number(1.01, "×", 1.0, 1.02, 8)}
    shown = beside(result.slow, vit=alone, gpt={})
    assert shown["source line"].tolist() == ["b.py:3", "", ""]
    assert shown["estimate"].tolist() == ["2.00×", "1.25×", "1.11×"]
    assert shown["fix"].tolist() == ["width_256", "bf16", "–"]
    width, bf16, padding = shown["measured"]
    assert width == "1.25× (1.20 to 1.30)" and bf16.startswith("≤ ") and padding == "–"


def fix(name, us, width=0.1):
    row = {"fix": name, "us_per_target": us, "baseline_us_per_target": 100.0, "ratio": us / 100, "pairs": 7}
    return row | {"low": us / 100 - width, "high": us / 100 + width}


def test_fixes_are_ordered_by_effect():
    fixes = profiling.vit_fixes.of_rows(
        pd.DataFrame([fix("workers", 99.0), fix("decode_once", 50.0), fix("all", 25.0)])
    )
    assert fixes.table["fix"].tolist() == ["decode_once", "all"]
    assert fixes.without.undecided.startswith("workers (the training process makes each batch itself) ≤ ")
    assert fixes.without.none == "none"
    assert (fixes.largest, f"{fixes.largest_gain:1}") == ("decode_once", "2.0× (1.7 to 2.5, 7 pairs)")
    assert f"{fixes.together:brief}" == "4.0×" and f"{fixes.product}" == "2.0×"


def test_what_parts_leave_of_a_model_is_lost_where_their_medians_are_more_than_its():
    def part(module, forward_ms, kind=""):
        times = {"forward_ms": forward_ms, "backward_ms": 5.0, "total_ms": 1.0, "lower_bound_ms": None}
        times["activation_mib"] = forward_ms
        return {"pipeline": "vit", "variant": "slow", "module": module, "type": kind, "calls": 1} | times

    rows = [part("vit", 10.0), part("vit.mlp", 7.0), part("vit.head", 2.0), part("outside", 0.0) | {"calls": 0}]
    (table, _) = profiling.modules.of_rows(pd.DataFrame(rows)).tables.values()
    rest = table.set_index("part").loc["rest"]
    assert rest["slow forward_ms"] == rest["slow activation_mib"] == 1.0 and pd.isna(rest["slow backward_ms"])


def test_layers_without_products_are_compared_with_their_bounds_and_in_half_precision():
    def layer(variant, kind, total_ms, bound):
        times = {"forward_ms": 1.0, "backward_ms": 1.0, "activation_mib": 1.0, "calls": 1}
        times |= {"total_ms": total_ms, "lower_bound_ms": bound}
        return {"pipeline": "vit", "variant": variant, "module": f"vit.{kind}", "type": kind} | times

    rows = [layer("slow", "GELU", 6.0, 1.5), layer("slow", "Linear", 60.0, 50.0), layer("fixed", "GELU", 7.5, 0.75)]
    rows += [{**row, "module": "vit", "type": "ViT", "lower_bound_ms": None} for row in (rows[1], rows[2])]
    numbers = profiling.modules.of_rows(pd.DataFrame(rows))
    assert (f"{numbers.least_above}", f"{numbers.gelu_in_half}") == ("4.0×", "1.25×")
    nothing = profiling.modules.of_rows(pd.DataFrame([row for row in rows if row["type"] != "GELU"]))
    assert not nothing.least_above.measured and not nothing.gelu_in_half.measured


def test_fixes_of_a_gpu_that_measured_one():
    fixes = profiling.gpt_fixes.of_rows(pd.DataFrame([fix("packed", 50.0)]))
    assert fixes.second == "" and not fixes.together.measured
