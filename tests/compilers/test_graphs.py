import pytest
import torch
import torch.nn.functional as F

from helpers.compilers import graphs, kernels
from helpers.compilers.capture import COMPILE, EXPORT, FULLGRAPH, FX, INDUCTOR, SCRIPT, TRACE
from helpers.compilers.graphs import generated_code, kernel_body, show
from helpers.compilers.specimens import SPECIMENS
from helpers.compilers.words import clean, first_line

needs_compiler = pytest.mark.usefixtures("compiler")


@pytest.fixture
def compiler():
    if lacking := kernels.no_compiler():
        pytest.skip(lacking)


def branch(way):
    case = SPECIMENS["branch on data"]()
    return show(way, case.fn, *case.example)


def test_a_trace_has_one_path_and_a_script_both():
    assert "aten::neg" not in branch(TRACE)
    assert "aten::div" in branch(TRACE)
    assert "prim::If" in branch(SCRIPT)
    assert "aten::neg" in branch(SCRIPT)


def test_dynamo_shows_every_graph_that_it_broke_the_function_into():
    text = branch(COMPILE)
    assert "# graph 1 of 2" in text
    assert "# graph 2 of 2" in text
    assert text.index("sum()") < text.index("# graph 2 of 2") < text.index("abs()")


def test_what_cannot_be_captured_raises_what_capturing_raises():
    with pytest.raises(torch.fx.proxy.TraceError):
        branch(FX)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        branch(FULLGRAPH)


def gelu_sum(x):
    return F.gelu(x * 2).sum(-1)


def test_export_speaks_in_operations_with_their_shapes():
    text = show(EXPORT, gelu_sum, torch.ones(4, 8))
    assert 'gelu: "f32[4, 8]" = torch.ops.aten.gelu.default' in text
    assert "sum_1: USER_OUTPUT" in text


@pytest.mark.parametrize("way", [TRACE, SCRIPT, FX, COMPILE, EXPORT])
def test_text_is_the_same_every_time_and_tells_no_place(way):
    first = show(way, gelu_sum, torch.ones(4, 8))
    assert first == show(way, gelu_sum, torch.ones(4, 8))
    assert "0x" not in first
    assert __file__ not in first
    assert "/tmp" not in first


@needs_compiler
def test_inductor_writes_one_kernel_for_a_chain():
    x = torch.ones(4, 8)
    (kernel,) = generated_code(gelu_sum, x)
    body = kernel_body(kernel)
    assert body.startswith('extern "C"')
    assert "erf" in body
    assert "#include" in kernel
    assert "#include" not in body
    assert show(INDUCTOR, gelu_sum, x) == graphs._tidy(body)


def test_a_triton_kernel_is_shown_from_its_signature():
    written = "import triton\n@triton.jit\ndef triton_poi_fused_0(in_ptr0, xnumel):\n    xnumel = 8\n    x = 1\n"
    assert kernel_body(written) == "def triton_poi_fused_0(in_ptr0, xnumel):\n    xnumel = 8\n    x = 1"


def test_words_are_cleaned_of_what_differs_between_runs():
    assert clean("<f at 0x7f00aa12bb34> in /home/someone/x.py:12") == "<f> in x.py"
    assert clean("graph_17_cpp_fused_add_0") == "cpp_fused_add_0"
    assert first_line("\n  said   # there\n more") == "said"
    assert len(first_line("a" * 1000)) == 200


def test_an_unknown_way_is_named():
    with pytest.raises(ValueError, match=r"way is 'xla'; it must be one of: torch.jit.trace"):
        show("xla", gelu_sum, torch.ones(2))
