"""What each variant captured, as text; and what torch says when it refuses, in a line."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.compilers import show
from helpers.compilers.capture import DYNAMO, EXPORT, generated_code, kernel_body
from helpers.compilers.messages import clean, failure_line


def squeezed(x):
    if x.sum() < 0:
        return -x
    return x / (1 + x.abs())


def gelu_sum(x):
    return F.gelu(x * 2).sum(-1)


def test_dynamo_shows_every_graph_that_it_broke_the_function_into_and_names_no_address_and_no_path():
    x = torch.linspace(0, 1, 5)
    text = show(DYNAMO, squeezed, x)
    assert text.index("# graph 1 of 2") < text.index("sum()") < text.index("# graph 2 of 2") < text.index("abs()")
    assert text == show(DYNAMO, squeezed, x)
    assert not any(word in text for word in ("0x", __file__, "/tmp"))


def test_only_what_dynamo_captures_is_shown():
    with pytest.raises(ValueError, match=r"variant is 'torch\.export'; valid: 'Dynamo', 'torch\.compile'"):
        show(EXPORT, gelu_sum, torch.ones(4, 8))


@pytest.mark.usefixtures("compiler")
def test_inductor_writes_one_kernel_for_a_chain():
    x = torch.ones(4, 8)
    (kernel,) = generated_code(gelu_sum, x)
    body = kernel_body(kernel)
    assert body.startswith('extern "C"')
    assert "erf" in body
    assert "#include" in kernel
    assert "#include" not in body


def test_messages_are_cleaned_of_what_differs_between_runs():
    assert clean("<f at 0x7f00aa12bb34> in /home/someone/x.py:12") == "<f> in x.py"
    assert clean("graph_17_cpp_fused_add_0") == "cpp_fused_add_0"


@settings(max_examples=25)
@given(st.text("a: \n\r\u2028\x1b[", max_size=300), st.text("a: \n\r\u2028\x1b[", max_size=300))
def test_any_error_becomes_one_line(outer, inner):
    error = RuntimeError(outer)
    error.__cause__ = ValueError(inner)
    line = failure_line("export", error)
    assert line.startswith("export failed")
    assert len(line.splitlines()) == 1
    assert len(line) <= 200
