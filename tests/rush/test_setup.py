"""Setups: contradictions are refused at once, what a machine lacks is told, and the ladder changes one thing a step."""

import contextlib
import dataclasses
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.rush import CPU_LADDER, LADDER, Setup, climb, rung, stands_on
from helpers.rush.setup import CHOICES, LADDERS, NEXT_BEST, START

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_an_unknown_value_is_refused_with_those_that_are_allowed():
    for field, valid in CHOICES.items():
        with pytest.raises(ValueError, match=f"{field} is 'nonsense'; valid: {valid[0]!r}"):
            Setup(**{field: "nonsense"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpointing": "memory budget"}, "'memory budget', which is the compiler's to keep; compile must not be"),
        ({"checkpointing": "selective", "mlp": "level 1"}, "both choose what the mlp keeps"),
        ({"precision": "amp-fp16", "cuda_graph": True, "optimizer": "foreach"}, "only optimizer 'fused' skips a step"),
        ({"precision": "amp-fp16", "optimizer": "in backward"}, "whose scale needs all gradients before a step"),
        ({"residual": "bf16"}, "residual is 'bf16' and precision 'fp32'"),
        ({"float8": "tensorwise", "precision": "tf32"}, "float8 is 'tensorwise' and precision 'tf32'"),
        ({"float8": "tensorwise", "precision": "bf16", "mlp": "level 0"}, "mlp must be 'plain'"),
        ({"float8": "tensorwise", "precision": "bf16", "sequence": 100}, "multiple of 16 tokens; .* is 100"),
        ({"sequence": 131073}, "sequence is 131073; llama-3.2-1b has positions for 131072"),
        ({"batch": 0}, "batch is 0"),
        ({"logits_gib": 0}, "logits_gib is 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; it must be above 0"),
    ],
)
def test_a_contradiction_is_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        Setup(**arguments)
    assert "\n" not in str(caught.value)


def test_on_a_cpu_what_needs_cuda_says_so():
    for name, value in {"attention": "cudnn", "cuda_graph": True, "precision": "tf32", "norm": "triton"}.items():
        assert Setup(**{name: value}).missing_because(CPU) == f"{name} {value!r}: needs CUDA"


@contextlib.contextmanager
def a_gpu(capability):
    """As if there were a GPU of this compute capability."""
    with mock.patch("torch.cuda.get_device_capability", return_value=capability):
        yield


def test_float8_tf32_and_bf16_need_the_units_for_them():
    setup = Setup(float8="tensorwise", precision="amp-bf16")
    with a_gpu((8, 0)):
        assert setup.missing_because(CUDA) == "float8 'tensorwise': needs a GPU of compute capability 8.9"
        assert setup.possible(CUDA) == dataclasses.replace(setup, float8="none")
        assert Setup(precision="tf32").missing_because(CUDA) == ""
    with a_gpu((9, 0)), mock.patch("helpers.lab.machine.installed", return_value="1"):
        assert setup.missing_because(CUDA) == ""
    with a_gpu((7, 5)):
        for precision, nearest in (("tf32", "fp32"), ("amp-bf16", "amp-fp16")):
            assert Setup(precision=precision).possible(CUDA) == Setup(precision=nearest)
        in_backward = Setup(precision="amp-bf16", optimizer="in backward", cuda_graph=True)
        assert in_backward.possible(CUDA) == Setup(precision="amp-fp16", optimizer="fused", cuda_graph=True)


def test_a_missing_package_is_named_as_not_installed():
    with mock.patch("helpers.lab.machine.installed", return_value=None):
        setup = Setup(optimizer="8-bit")
        assert setup.missing_because(CPU) == "optimizer '8-bit': not installed: torchao"
        assert setup.possible(CPU).optimizer == "fused"
        assert Setup(compile="default").missing_because(CUDA) == "compile 'default': not installed: triton"


def test_a_gpu_has_no_flash_kernel_for_fp32():
    with a_gpu((8, 0)):
        assert "it needs 'amp-bf16', 'amp-fp16' or 'bf16'" in Setup(attention="flash").missing_because(CUDA)
        assert Setup(attention="cudnn").possible(CUDA).attention == "math"
    assert Setup(attention="flash").missing_because(CPU) == ""


@pytest.mark.parametrize("attention", ["math", "eager"])
def test_attention_by_hand_in_tf32_goes_with_all_else_of_the_best_setup(attention):
    with a_gpu((9, 0)), mock.patch("helpers.lab.machine.installed", return_value="1"):
        best = dataclasses.replace(LADDER["batch 8"], precision="tf32", residual="weights", attention=attention)
        assert best.missing_because(CUDA) == ""


def test_on_a_gpu_without_bf16_units_the_ladder_is_climbed_in_fp16():
    ladder = {}
    with a_gpu((7, 5)), mock.patch("helpers.lab.machine.installed", return_value="1"):
        for step in LADDER:
            setup = rung(step, Setup(model="llama-60m"), CUDA)
            ladder[step] = setup.missing_because(CUDA) or setup
    runs = {step: setup for step, setup in ladder.items() if isinstance(setup, Setup)}
    lacking = {"TF32", "FlashAttention", "cuDNN attention", "bf16 residual stream", "float8", "float8 by rows"}
    lacking |= {"FlashAttention, captured", "optimizer in backward"}
    assert set(LADDER) - set(runs) == lacking
    assert {setup.precision for setup in runs.values()} == {"fp32", "amp-fp16"}
    assert runs["mixed precision"].precision == "amp-fp16" and runs["no optimisation"].precision == "fp32"
    assert runs["chunked cross-entropy"].attention == "math"
    assert [step for step, setup in runs.items() if setup.cuda_graph and setup.optimizer != "fused"] == []
    assert not runs["8-bit optimizer state"].cuda_graph and runs["batch 8"].cuda_graph


def test_without_a_compiler_the_memory_budget_becomes_full_checkpointing():
    with mock.patch("helpers.lab.machine.shutil.which", return_value=None):
        nearest = Setup(compile="max-autotune", checkpointing="memory budget").possible(CPU)
    assert (nearest.compile, nearest.checkpointing) == ("none", "full")


@given(st.fixed_dictionaries({field: st.sampled_from(values) for field, values in CHOICES.items()}), st.booleans())
def test_the_nearest_possible_setup_is_always_possible(fields, graph):
    try:
        setup = Setup(**fields, cuda_graph=graph, sequence=64)
    except ValueError:
        return
    nearest = setup.possible(CPU)
    assert nearest.missing_because(CPU) == ""
    replaced = nearest.differs(setup).keys()
    assert replaced <= {*NEXT_BEST, "residual", "checkpointing"}
    assert bool(replaced) == bool(setup.missing_because(CPU))


@pytest.mark.parametrize(("kind", "ladder"), [("cuda", LADDER), ("cpu", CPU_LADDER)])
def test_each_step_of_a_ladder_changes_one_thing(kind, ladder):
    steps, left = LADDERS[kind]
    assert list(ladder) == [START, *steps]
    assert left.keys() <= steps.keys()
    for name, change in steps.items():
        assert list(ladder[name].differs(ladder[stands_on(name, kind)])) == list(change)
        assert len(change) == 1
        assert stands_on(name, kind) not in left


def test_no_step_of_the_cpus_ladder_needs_a_gpu():
    reasons = {setup.missing_because(CPU) for setup in CPU_LADDER.values()}
    assert all("C++ compiler" in reason or "oneDNN has no other kernel" in reason for reason in reasons - {""})


def test_the_next_step_stands_on_the_last_that_was_not_left():
    assert stands_on("TF32") == START
    with pytest.raises(ValueError, match="step is 'none'; valid: 'TF32', "):
        stands_on("none")


def test_the_ladder_can_be_climbed_from_elsewhere():
    small = climb(Setup(model="tiny", sequence=64))
    assert {setup.model for setup in small.values()} == {"tiny"}
    assert {name: setup.batch for name, setup in small.items()} == {name: setup.batch for name, setup in LADDER.items()}
