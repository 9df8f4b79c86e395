"""Variants of AdamW take the same step."""

import dataclasses
import itertools

import pytest
import torch

from helpers.lab import peak_memory
from helpers.lab.machine import installed
from helpers.lab.timing import check_agreement
from helpers.rush import Setup, build_trainer, optimizers
from helpers.rush.measurement import fixed_tokens

TINY = Setup(model="tiny", sequence=16)


def trainer(optimizer):
    return build_trainer(dataclasses.replace(TINY, optimizer=optimizer))


def weights(variant, steps=2, **options):
    torch.manual_seed(0)
    weight = torch.randn(16, 256, requires_grad=True)  # torchao's state is in 8 bits from 4,096 numbers on
    optimizer = optimizers.build_optimizer(variant, [weight], lr=0.1, weight_decay=0.3, **options)
    for _ in range(steps):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    return weight, optimizer


def test_variants_of_torch_take_the_same_steps():
    check_agreement({name: lambda name=name: weights(name)[0] for name in optimizers.FLAGS}, 1e-5)


@pytest.mark.skipif(installed("torchao") is None, reason="needs torchao")
def test_with_8_bits_of_state_the_first_step_is_adamws_and_the_state_is_small(monkeypatch):
    compile = torch.compile  # traced only: writing code takes a minute
    monkeypatch.setattr(torch, "compile", lambda fn, **options: compile(fn, backend="eager", **options))
    weight, optimizer = weights(optimizers.EIGHT_BIT, steps=1, capturable=True)
    torch.testing.assert_close(weight, weights(optimizers.FUSED, steps=1)[0], atol=1e-5, rtol=1e-5)
    assert {moment.codes.dtype for name, moment in optimizer.state[weight].items() if name != "step"} == {torch.uint8}


def test_in_backward_the_steps_are_the_fused_ones_bit_for_bit_and_no_gradient_is_left():
    fused, in_backward = trainer(optimizers.FUSED), trainer(optimizers.IN_BACKWARD)
    for tokens in itertools.islice(fixed_tokens(TINY), 6):
        assert float(fused.step(tokens)) == float(in_backward.step(tokens))
    pairs = zip(fused.model.parameters(), in_backward.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    in_backward.loss(tokens)[0].backward()
    assert all(weight.grad is None for weight in in_backward.model.parameters())


def test_in_backward_gradients_are_never_all_in_memory():
    tokens, peaks = next(fixed_tokens(TINY)), {}
    for name in (optimizers.FUSED, optimizers.IN_BACKWARD):
        made = trainer(name)
        made.step(tokens)
        peaks[name] = peak_memory(lambda made=made: made.step(tokens)).peak_bytes
    gradients = 4 * sum(weight.numel() for weight in made.model.parameters())
    assert peaks[optimizers.FUSED] - peaks[optimizers.IN_BACKWARD] > 0.5 * gradients
