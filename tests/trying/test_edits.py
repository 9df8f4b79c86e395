"""Edits of source: what is given to a call, put before a statement or at the top, and the diff of all."""

import pytest

from helpers.trying.edits import Before, Keywords, Shell, Top, diff

SOURCE = '''"""A script."""
from __future__ import annotations
import os
import torch  # é

def build(model):
    return torch.optim.AdamW(
        model.parameters(),
        lr=1e-3,  # peak
        fused=False,
    )
loader = DataLoader(data, batch_size=8)
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    return str(path)


def test_keywords_are_replaced_or_appended_at_the_call(file):
    edits = [Keywords((file, 7), "AdamW", {"fused": "True", "foreach": "False"})]
    changed = edits[0].changed(SOURCE)
    assert "lr=1e-3,  # peak\n        fused=True,\n    foreach=False)" in changed
    compile(changed, "train.py", "exec")
    assert Keywords((file, 12), "DataLoader", {"num_workers": "2"}).changed(SOURCE).endswith("=8, num_workers=2)\n")


def test_lines_are_put_before_the_statement_with_its_indent(file):
    changed = Before((file, 8), ("model.compile()",)).changed(SOURCE)
    assert "def build(model):\n    model.compile()\n    return" in changed


def test_lines_at_the_top_follow_the_import_of_torch(file):
    changed = Top(file, ("torch.set_num_threads(1)",)).changed(SOURCE)
    assert "import torch  # é\ntorch.set_num_threads(1)\n" in changed


def test_the_diff_holds_all_edits_of_a_file_and_names_the_shells(file, tmp_path):
    edits = [Shell({"OMP_NUM_THREADS": "1"}), Keywords((file, 12), "DataLoader", {"num_workers": "2"})]
    edits += [Top(file, ("x = 1",)), Before((file, 7), ("model.compile()",))]
    text = diff(edits, str(tmp_path))
    assert text.startswith("# shell: OMP_NUM_THREADS=1 python …\n--- a/train.py\n+++ b/train.py\n")
    assert text.count("\n+") == 4 and text.count("\n-") == 2


def test_a_call_that_is_not_there_says_so(file):
    with pytest.raises(ValueError, match=r"train.py:1 has no call of SGD"):
        Keywords((file, 1), "SGD", {}).changed(SOURCE)
