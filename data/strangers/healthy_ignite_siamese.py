"""Siamese signature verification; Engine with events and handlers."""
from collections import defaultdict
from enum import Enum
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class Events(Enum):
    STARTED = "started"
    EPOCH_STARTED = "epoch_started"
    ITERATION_COMPLETED = "iteration_completed"
    EPOCH_COMPLETED = "epoch_completed"
    COMPLETED = "completed"

    def __call__(self, every):
        return (self, every)


class Engine:
    def __init__(self, process):
        self.process, self.handlers = process, defaultdict(list)
        self.state = SimpleNamespace(iteration=0, epoch=0, output=None, metrics={})

    def on(self, event):
        event, every = event if isinstance(event, tuple) else (event, 1)
        def wrap(fn):
            self.handlers[event].append((every, fn))
            return fn
        return wrap

    def fire(self, event):
        count = self.state.epoch if "EPOCH" in event.name else self.state.iteration
        for every, fn in self.handlers[event]:
            if every == 1 or count % every == 0:
                fn(self)

    def run(self, data, max_epochs=1):
        self.fire(Events.STARTED)
        for self.state.epoch in range(self.state.epoch + 1, self.state.epoch + max_epochs + 1):
            self.fire(Events.EPOCH_STARTED)
            for batch in data:
                self.state.iteration += 1
                self.state.output = self.process(self, batch)
                self.fire(Events.ITERATION_COMPLETED)
            self.fire(Events.EPOCH_COMPLETED)
        self.fire(Events.COMPLETED)
        return self.state


class RunningAverage:
    def __init__(self, alpha=0.95):
        self.alpha, self.value = alpha, None

    def attach(self, engine, name):
        @engine.on(Events.ITERATION_COMPLETED)
        def update(e):
            v = e.state.output
            self.value = v if self.value is None else self.alpha * self.value + (1 - self.alpha) * v
            e.state.metrics[name] = self.value


class PairStream:
    """Genuine / forged pairs drawn from per-writer stroke images, half each."""

    def __init__(self, images, batch_size, batches):
        self.images, self.batch_size, self.batches = images, batch_size, batches

    def __len__(self):
        return self.batches

    def __iter__(self):
        writers, copies = self.images.shape[:2]
        for _ in range(self.batches):
            b = self.batch_size
            same = (torch.arange(b) % 2 == 0)
            w1 = torch.randint(writers, (b,))
            w2 = torch.where(same, w1, (w1 + torch.randint(1, writers, (b,))) % writers)
            left = self.images[w1, torch.randint(copies, (b,))]
            right = self.images[w2, torch.randint(copies, (b,))]
            yield left, right, same.float()


def signatures(writers, copies, size, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, 80)
    freq = torch.randint(1, 6, (writers, 1, 2, 3), generator=g).float()
    amp = torch.rand(writers, 1, 2, 3, generator=g) * 0.35
    phase = 6.28 * torch.rand(writers, 1, 2, 3, generator=g) + 0.25 * torch.randn(writers, copies, 2, 3, generator=g)
    curve = (amp[..., None] * torch.sin(6.28 * freq[..., None] * t + phase[..., None])).sum(3)
    pix = ((curve + 1) / 2 * (size - 1)).round().clamp(0, size - 1).long()
    img = torch.zeros(writers, copies, size * size)
    img.scatter_(2, pix[:, :, 1] * size + pix[:, :, 0], 1.0)
    img = F.avg_pool2d(img.view(-1, 1, size, size), 3, 1, 1) * 3
    return img.view(writers, copies, 1, size, size)


class Tower(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        def block(i, o):
            return [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        self.net = nn.Sequential(*block(1, 16), *block(16, 32), *block(32, 64), nn.Flatten(), nn.Linear(64 * 36, dim))

    def forward(self, left, right):
        both = torch.cat([left, right]).contiguous(memory_format=torch.channels_last)
        return F.normalize(self.net(both), dim=1).chunk(2)


def contrastive(a, b, same, margin=0.8):
    dist = (a - b).square().sum(1).add(1e-9).sqrt()
    return (same * dist.square() + (1 - same) * F.relu(margin - dist).square()).mean(), dist


def run():
    torch.manual_seed(3)
    model = Tower().to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97)
    train_data = PairStream(signatures(200, 12, 48, 0), batch_size=48, batches=60)
    valid_data = PairStream(signatures(40, 12, 48, 1), batch_size=96, batches=2)

    def train_step(engine, batch):
        model.train()
        left, right, same = batch
        loss, _ = contrastive(*model(left, right), same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def valid_step(engine, batch):
        model.eval()
        left, right, same = batch
        _, dist = contrastive(*model(left, right), same)
        return ((dist < 0.5).float() == same).float().mean().item()

    trainer, evaluator = Engine(train_step), Engine(valid_step)
    RunningAverage().attach(trainer, "loss")
    RunningAverage(alpha=0.5).attach(evaluator, "accuracy")

    @trainer.on(Events.ITERATION_COMPLETED(every=20))
    def log_loss(engine):
        print(f"Epoch[{engine.state.epoch}] Iteration[{engine.state.iteration}] "
              f"loss: {engine.state.metrics['loss']:.4f}", flush=True)

    @trainer.on(Events.EPOCH_COMPLETED)
    def decay(engine):
        scheduler.step()

    @trainer.on(Events.EPOCH_COMPLETED(every=2))
    def validate(engine):
        metrics = evaluator.run(valid_data).metrics
        print(f"Epoch[{engine.state.epoch}] validation accuracy: {metrics['accuracy']:.3f}", flush=True)

    trainer.run(train_data, max_epochs=60)


if __name__ == "__main__":
    run()
