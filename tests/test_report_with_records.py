"""With records of a GPU, made-up ones here, the report quotes them: no more, no less.

A file of its own, so that it can run beside the other builds of the report.
"""

import shutil
from pathlib import Path

import fake_records
import pytest
import torch
from claims import Records, faults, sentences
from pdf_text import pages_of

from helpers.lab.report import build

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU a notebook measures the full preset")
def test_with_records_the_report_quotes_them(tmp_path):
    results = tmp_path / "results"
    fake_records.write(results)
    notebooks = sorted(shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks").glob("*.ipynb"))
    written = {"output": tmp_path / "report.pdf", "figures": tmp_path / "figures", "results": results}
    pdf = build(notebooks, **written, save_notebooks=True, live=False, progress=False)
    text = " ".join(" ".join(pages_of(pdf)).split())
    assert "NVIDIA Test, torch 2.13.0+cu130, CUDA 13.0, driver 1.2.3, 2026-01-02" in text
    assert "out of memory" in text
    assert "keeping two, time, d = 2048, NVIDIA Test: 1.000 (at most 1.00: reached)" in text
    assert "measured +0.5% from predicted, within the 2 % aimed at" in text
    assert "the unsynchronised clock is 100 times too fast" in text
    assert "segmentation with a dynamic scale, lowest of all seeds: 0.9900 (at least 0.985: reached)" in text
    assert "diverged at least once: pure fp16" in text
    assert "unscale, clip and step 1.44× as fast as torch's (reached: at least 1.3)" in text
    assert "the whole training takes 300 s at the start" in text
    assert "shards 5.0× (webdataset by index, image); a mapped file 9.0×" in text
    assert "ONNX Runtime on bert-base, mean over batches of 1, 8, 1.50× (reached: at least 1.3)" in text
    assert text.count("not measured") == 2, "only the goal that is about a CPU: its row, and the count of goals"
    assert "37 reached; 1 missed; 1 not measured" in text
    assert "small preset" not in text
    records = Records(results)
    assert [fault for path in notebooks for said in sentences(path) for fault in faults(said, records)] == []
