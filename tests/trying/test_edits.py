"""Edits of source: what is given to a call, put before a statement or at the top, and the diff of all."""

import pytest

from helpers.trying.change import Keywords, Lines, Shell, diff

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


@pytest.mark.parametrize(
    ("edit", "changed"),
    [
        (
            Keywords(("train.py", 7), "AdamW", {"fused": "True", "foreach": "False"}),
            "lr=1e-3,  # peak\n        fused=True,\n    foreach=False)",
        ),
        (Keywords(("train.py", 12), "DataLoader", {"num_workers": "2"}), "batch_size=8, num_workers=2)\n"),
        (Lines(("train.py", 8), ("model.compile()",)), "def build(model):\n    model.compile()\n    return"),
        (Lines(("train.py", 0), ("torch.set_num_threads(1)",)), "import torch  # é\ntorch.set_num_threads(1)\n"),
    ],
)
def test_an_edit_keeps_comments_and_layout(edit, changed):
    text = edit.changed(SOURCE)
    assert changed in text
    compile(text, "train.py", "exec")


@pytest.mark.parametrize("options", ["options", "options if fast else {}"])
def test_keywords_go_over_those_that_a_call_unpacks(options):
    text = Keywords(("a.py", 1), "dict", {"workers": "2"}).changed(f"made = dict(size=8, **{options})\n")
    names = {"options": {"workers": 0, "pinned": True}, "fast": True}
    exec(text, names)
    assert names["made"] == {"size": 8, "workers": 2, "pinned": True}


def test_the_diff_holds_all_edits_of_a_file_and_names_the_shells(tmp_path):
    (tmp_path / "train.py").write_text(SOURCE)
    file = str(tmp_path / "train.py")
    edits = [Shell({"OMP_NUM_THREADS": "1"}), Keywords((file, 12), "DataLoader", {"num_workers": "2"})]
    edits += [Lines((file, 0), ("x = 1",)), Lines((file, 7), ("model.compile()",))]
    text = diff(edits, str(tmp_path))
    assert text.startswith("# shell: OMP_NUM_THREADS=1 python …\n--- a/train.py\n+++ b/train.py\n")
    assert text.count("\n+") == 4 and text.count("\n-") == 2


def test_a_call_that_is_not_there_says_so():
    with pytest.raises(ValueError, match=r"train.py:1 has no call of SGD"):
        Keywords(("train.py", 1), "SGD", {}).changed(SOURCE)
