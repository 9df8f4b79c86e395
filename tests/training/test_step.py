"""The trainer's step: what it computes, when gradients are freed, and what sees them scaled."""

import pytest
import torch
import torch.nn.functional as F

from helpers.amp import DynamicGradScaler
from helpers.training import Trainer
from helpers.training.trainer import advance

X, Y = torch.ones(4, 3), torch.zeros(4, 1)


def made(**options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(x, y):
        output = model(x)
        return F.mse_loss(output, y), output

    return Trainer(model, loss, optimizer, **options)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_step_is_that_of_a_plain_loop_scaled_or_not(scaled, clip):
    trainer, plain = made(scaler=DynamicGradScaler("cpu", 8.0) if scaled else None, clip=clip, divide=2), made()
    for _ in range(2):
        loss, output = trainer.update(X, Y)
        plain.optimizer.zero_grad()
        (plain.loss(X, Y)[0] / 2).backward()
        norm = advance(plain.optimizer, clip=clip)
        torch.testing.assert_close(trainer.norm, norm)
    torch.testing.assert_close(trainer.model.weight, plain.model.weight)
    assert not loss.requires_grad and not output.requires_grad


def test_gradients_stay_until_the_next_step_or_are_freed_at_the_end():
    for options, freed in (({}, False), ({"frees": True}, True)):
        trainer = made(**options)
        trainer.step(X, Y)
        assert (trainer.model.weight.grad is None) == freed
    trainer = made(zeros=True)
    trainer.step(X, Y)
    before = trainer.model.weight.grad
    trainer.step(X, Y)
    assert trainer.model.weight.grad is before


def test_who_looks_sees_scaled_gradients_and_old_weights():
    trainer, plain, seen = made(scaler=DynamicGradScaler("cpu", 8.0)), made(), []
    weight = trainer.model.weight
    before = weight.detach().clone()
    trainer.update(X, Y, look=lambda loss: seen.append((weight.grad.clone(), weight.detach().clone())))
    plain.step(X, Y)
    scaled, weight = seen[0]
    torch.testing.assert_close(scaled, 8 * plain.model.weight.grad)
    assert torch.equal(weight, before)
