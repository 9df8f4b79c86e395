"""Chapter 7's numbers from rows: what is counted, what is compared, and what is missing."""

import pandas as pd
import pytest

from helpers.chapters import compilers
from helpers.chapters.compilers.workloads import BERT_BASE


def fusion_row(case, variant, ratio, **others):
    row = {"case": case, "size": 2**23, "variant": variant, "ratio": ratio, "median_ms": 10 * ratio, "p20_ms": 1.0}
    return row | {"p80_ms": 2.0, "baseline_ms": 10.0, "kernels": 1, "bytes_moved": 30.0, "bytes_least": 10.0} | others


FUSION = [
    fusion_row("chain", "eager", 1.0),
    fusion_row("chain", "torch.compile", 0.25, bytes_moved=10.0),
    fusion_row("chain", "by hand", 0.5),
    fusion_row("AdamW", "eager", 1.0),
    fusion_row("AdamW", "torch.compile", 1.0),
    fusion_row("AdamW", "foreach", 0.8),
    fusion_row("AdamW", "fused", 0.2),
]


def latency_row(backend, batch=1, model=BERT_BASE, speedup=2.0, **others):
    row = {"model": model, "precision": "fp32", "batch": batch, "backend": backend, "speedup": speedup, "build_s": 3.0}
    times = {"median_ms": 10 / speedup, "baseline_ms": 10.0, "p20_ms": 4.0, "p80_ms": 6.0}
    return row | times | {"speedup_p20": speedup, "speedup_p80": speedup} | others


def test_fusion_takes_the_faster_version_by_hand_and_ranks_what_was_compiled():
    smaller = fusion_row("chain", "torch.compile", 0.1) | {"size": 2**20}
    named = compilers.fusion.of_rows(pd.DataFrame([*FUSION, smaller]))
    assert named.bars["variant"].tolist() == ["eager", "torch.compile", "by hand", "eager", "torch.compile", "fused"]
    assert (float(named.cases), float(named.faster), float(named.largest.speedup)) == (2, 1, 4)
    assert (named.largest.case, named.smallest.case) == ("chain", "AdamW")
    assert f"{named.largest.bytes}" == "33%"
    assert float(named.median) == 2.5


def test_a_host_bound_time_is_no_speedup_of_a_kernel():
    shares = {("chain", "eager"): 0.5, ("AdamW", "fused"): 0.6}
    rows = [row | {"device_share": shares.get((row["case"], row["variant"]), 0.98)} for row in FUSION]
    named = compilers.fusion.of_rows(pd.DataFrame(rows))
    assert named.bars[["case", "variant"]].values.tolist() == [["AdamW", "eager"], ["AdamW", "torch.compile"]]
    assert (float(named.cases), named.largest.case) == (1, "AdamW")
    unknown = compilers.fusion.of_rows(pd.DataFrame(FUSION))
    assert unknown.largest.case == "chain", "rows of earlier methods don't say how busy the GPU was"


def test_without_a_compiler_fusion_by_hand_is_still_shown():
    rows = pd.DataFrame([row for row in FUSION if row["variant"] != "torch.compile"])
    named = compilers.fusion.of_rows(rows)
    assert named.bars["variant"].tolist() == ["eager", "by hand", "eager", "fused"]
    assert not any(number.measured for number in (named.largest.speedup, named.median, named.chain))


def test_a_mean_is_over_all_batches_and_has_an_interval_where_the_rows_have_one():
    interval = {"ratio": 0.5, "low": 0.4, "high": 0.625, "pairs": 10}
    both = [latency_row("ONNX Runtime", batch, speedup=s) for batch, s in ((1, 2.0), (8, 3.0))]
    rows = [*both, latency_row("compile"), latency_row("compile", 8), latency_row("OpenVINO", speedup=9.0)]
    named = compilers.latency.of_rows(pd.DataFrame(rows))
    assert f"{named.bert_onnx}" == "2.45× (unpaired)"
    assert (named.best_backend, named.best_model) == ("ONNX Runtime", "BERT-base")
    assert not named.bert_openvino.measured, "its other batch is missing"
    assert named.bert_compile.at_most(1.1).outcome == "does not hold"
    assert named.table["backend"].tolist() == ["ONNX Runtime", "torch.compile", "OpenVINO"]
    onnx, compiled, openvino = named.table["BERT-base, batch 8, ms"]
    assert onnx.endswith(" (3.00×)") and compiled.endswith(" (2.00×)") and pd.isna(openvino)
    paired = compilers.latency.of_rows(pd.DataFrame([row | interval for row in rows]))
    assert f"{paired.bert_onnx}" == "2.00× (1.60 to 2.50, 20 pairs)"


def test_a_training_step_that_is_no_faster_has_no_break_even():
    rows = [latency_row("compile", 8, model, s) for model, s in (("ResNet", 1.02), ("Llama, 256 tokens", 1.3))]
    named = compilers.training.of_rows(pd.DataFrame(rows).assign(break_even_steps=100.0))
    assert named.steps["break-even steps"].isna().tolist() == [True, False]
    assert (named.most_model, f"{named.most_break_even}") == ("Llama", "100")
    assert (float(named.least), float(named.most)) == (pytest.approx(1.02), pytest.approx(1.3))
