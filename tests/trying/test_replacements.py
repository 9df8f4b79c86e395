"""Code that a replacement finds in a source, and what it leaves alone."""

import textwrap

import pytest
import torch

from helpers.trying import changes, replacements

HEAD = "import math\nimport torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n\n"
STYLES = {
    "causal": """
        def attend(q, k, v):
            T = q.size(-2)
            mask = torch.tril(torch.ones(T, T))
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(mask[:T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            y = att @ v  # (B, H, T, C)
            return y
        """,
    "matmul": """
        def attend(q, k, v):
            hidden = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).triu(1)
            scores = torch.matmul(q, k.transpose(2, 3)) / k.size(-1) ** 0.5
            scores = scores.masked_fill(hidden, -1e9)
            weights = torch.softmax(scores, -1)
            return torch.matmul(weights, v)
        """,
    "added": """
        def attend(q, k, v):
            bias = torch.arange(q.size(-2)).float()[None]
            dots = q @ k.transpose(-1, -2) * 0.3
            return (dots + bias).softmax(dim=-1) @ v
        """,
    "scaled before": """
        def attend(q, k, v, drop=nn.Dropout(0.5).eval()):
            q = q / 4
            weights = drop(F.softmax(q @ k.transpose(-2, -1), dim=-1))
            return weights @ v
        """,
}
OTHERS = {
    "weights are returned": "att = F.softmax(q @ k.transpose(-2, -1), dim=-1)\n    return att @ v, att",
    "another dimension": "att = F.softmax(q @ k.transpose(-2, -1), dim=1)\n    return att @ v",
    "a bias after the softmax": "att = F.softmax(q @ k.transpose(-2, -1), dim=-1) + 1\n    return att @ v",
    "masked by zeros": "att = (q @ k.transpose(-2, -1)).masked_fill(q > 0, 0.0)\n    return att.softmax(-1) @ v",
    "masked in place": "a = q @ k.transpose(-2, -1)\n    a.masked_fill_(q > 0, -1e9)\n    return a.softmax(-1) @ v",
    "no scores": "att = F.softmax(q, dim=-1)\n    return att @ v",
}


KNOWN = {  # what a source has, and what it becomes
    ("no-recomputing", "plain"): (
        "from torch.utils.checkpoint import checkpoint\n"
        "y = checkpoint(torch.addcmul, x, x, x, value=2, use_reentrant=False)",
        "torch.addcmul(x, x, x, value=2)",
    ),
    ("embedding", "operator"): ("y = F.one_hot(ids, 4).float() @ x", "F.embedding(ids, x)"),
    ("embedding", "function"): (
        "y = torch.matmul(nn.functional.one_hot(ids, 4).float(), x)",
        "nn.functional.embedding(ids, x)",
    ),
    ("counts", "items"): (
        "y = torch.zeros(4, 4)\nfor t, p in zip(ids, ids.flip(0)):\n    y[p.item(), int(t)] += 1",
        "y.index_put_((torch.as_tensor(ids.flip(0)).flatten(), torch.as_tensor(ids).flatten())",
    ),
    ("counts", "lists"): (
        "y = torch.zeros(4, 4)\nfor t, p in zip(ids.flatten().tolist(), ids.view(-1).tolist()):\n    y[t, p] += 1",
        "y.index_put_((ids.flatten(), ids.view(-1))",
    ),
    ("sparse-gradients", "module"): (
        "layer = nn.Embedding(4, 3, padding_idx=0, _weight=x)\ny = layer(ids)",
        "nn.Embedding(4, 3, padding_idx=0, _weight=x, sparse=True)",
    ),
}
UNKNOWN = {
    "no-recomputing": "y = checkpoint(model, 'last.pt')",
    "embedding": "y = F.one_hot(ids, 4).float() * x",
    "counts": "for t, p in zip(ids, x):\n    y[t, p] += 1",
    "sparse-gradients": "layer = nn.Embedding(4, 3, sparse=False)",
}


def edited(text: str, kind: str) -> str:
    return changes.ALL[kind].replaced(text)


@pytest.mark.parametrize("style", STYLES)
def test_an_attention_that_is_spelled_out_is_one_call_with_the_same_values(style):
    text = HEAD + textwrap.dedent(STYLES[style]).lstrip()
    new = edited(text, "attention")
    assert "F.scaled_dot_product_attention(" in new and "softmax" not in new
    assert ("is_causal=True" in new) == (style == "causal")
    q, k, v = torch.randn(3, 2, 3, 5, 16)
    before, after = ({}, {})
    exec(text, before)
    exec(new, after)
    torch.testing.assert_close(after["attend"](q, k, v), before["attend"](q, k, v))


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_what_is_another_function_stays(body):
    text = f"{HEAD}def attend(q, k, v):\n    {body}\n"
    assert edited(text, "attention") == text


@pytest.mark.parametrize(("kind", "style"), KNOWN)
def test_a_known_replacement_has_the_same_values(kind, style):
    old, part = KNOWN[kind, style]
    new = edited(HEAD + old, kind)
    assert part in new
    values = [{"x": torch.arange(12.0).view(4, 3), "ids": torch.tensor([2, 0, 1, 3, 2, 2])} for _ in (old, new)]
    for text, names in zip((HEAD + old, new), values, strict=True):
        exec(text, names)
    assert torch.equal(values[0]["y"], values[1]["y"])


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_only_looks_like_it_stays(kind):
    assert edited(HEAD + UNKNOWN[kind], kind) == HEAD + UNKNOWN[kind]


def test_an_optimizer_that_takes_no_sparse_gradients_is_named():
    facts = {"optimizers": {"a": {"kind": "SGD"}, "b": {"kind": "AdamW"}}}
    assert changes.ALL["sparse-gradients"].missing_because(facts) == "AdamW takes no sparse gradients"


def test_a_function_that_evaluates_keeps_no_graph_and_one_that_trains_does():
    text = (
        HEAD
        + "def evaluate(model, x):\n    return model(x)\n\n\ndef main(model):\n    model.eval()\n    loss.backward()\n"
    )
    assert edited(text, "no-grad") == text.replace("def evaluate", "@torch.no_grad()\ndef evaluate")
    guarded = text.replace("    return", "    with torch.no_grad():\n        return")
    assert edited(guarded, "no-grad") == guarded


def test_the_lines_after_an_edit_keep_their_numbers(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(HEAD + textwrap.dedent(STYLES["causal"]).lstrip() + "raise ValueError\n")
    with pytest.raises(ValueError) as error:
        exec(replacements.compiled(str(file), changes.ALL["attention"].replaced), {})
    assert error.traceback[-1].lineno + 1 == len(file.read_text().splitlines())
