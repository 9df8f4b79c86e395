"""The training step: what it computes, when gradients are freed, and what sees them scaled."""

import pytest
import torch
import torch.nn.functional as F

from helpers.amp import DynamicGradScaler
from helpers.training import TrainingStep
from helpers.training.step import advance

X, Y = torch.ones(4, 3), torch.zeros(4, 1)


def stepping(**options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(x, y):
        output = model(x)
        return F.mse_loss(output, y), output

    return model, TrainingStep(loss, optimizer, **options)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_step_is_that_of_a_plain_loop_scaled_or_not(scaled, clip):
    model, step = stepping(scaler=DynamicGradScaler("cpu", 8.0) if scaled else None, clip=clip, divide=2)
    reference, plain = stepping()
    for _ in range(2):
        loss, output = step(X, Y)
        plain.optimizer.zero_grad()
        (plain.loss(X, Y)[0] / 2).backward()
        advance(plain.optimizer, clip=clip)
    torch.testing.assert_close(model.weight, reference.weight)
    assert not loss.requires_grad and not output.requires_grad


def test_gradients_stay_until_the_next_step_or_are_freed_at_the_end():
    for options, freed in (({}, False), ({"frees": True}, True)):
        model, step = stepping(**options)
        step(X, Y)
        assert (model.weight.grad is None) == freed
    model, step = stepping(zeros=True)
    step(X, Y)
    before = model.weight.grad
    step(X, Y)
    assert model.weight.grad is before


def test_who_looks_sees_scaled_gradients_and_old_weights():
    model, step = stepping(scaler=DynamicGradScaler("cpu", 8.0))
    before, seen = model.weight.detach().clone(), []
    step(X, Y, look=lambda loss: seen.append((model.weight.grad.clone(), model.weight.detach().clone())))
    (scaled, weight), (_, plain) = seen[0], stepping()
    plain(X, Y)
    torch.testing.assert_close(scaled, 8 * plain.optimizer.param_groups[0]["params"][0].grad)
    assert torch.equal(weight, before)
