"""Human dates -> ISO dates. Bahdanau encoder/decoder, callback-driven trainer."""
import random
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import List

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader


@dataclass
class Config:
    seed: int = 5
    samples: int = 6000
    batch_size: int = 64
    epochs: int = 60
    embed: int = 48
    hidden: int = 128
    lr: float = 1.5e-3
    clip: float = 2.0
    log_every: int = 40
    debug_grads: bool = True
    formats: List[str] = field(default_factory=lambda: [
        "%d %B %Y", "%b %d, %Y", "%A, %d %b %y", "%B %d %Y", "%d.%m.%Y", "the %d of %B, %Y"])


CHARS = ["<pad>", "<s>", "</s>"] + sorted(set("abcdefghijklmnopqrstuvwxyz0123456789 .,-"))
INDEX = {c: i for i, c in enumerate(CHARS)}
PAD, BOS, EOS = 0, 1, 2


def encode(text):
    return torch.tensor([INDEX[c] for c in text.lower()] + [EOS])


def make_pairs(cfg):
    rng = random.Random(cfg.seed)
    pairs = []
    for _ in range(cfg.samples):
        d = date(1950, 1, 1) + timedelta(days=rng.randrange(36500))
        pairs.append((encode(d.strftime(rng.choice(cfg.formats))), encode(d.isoformat())))
    return pairs


def collate(batch):
    batch = sorted(batch, key=lambda p: -len(p[0]))
    src, tgt = zip(*batch)
    lengths = torch.tensor([len(s) for s in src])
    return pad_sequence(src, batch_first=True), lengths, pad_sequence(tgt, batch_first=True)


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query, self.energy = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 1, bias=False)

    def forward(self, state, keys, values, mask):
        scores = self.energy(torch.tanh(keys + self.query(state)[:, None])).squeeze(-1)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return torch.bmm(weights[:, None], values).squeeze(1)


class Seq2Seq(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(len(CHARS), cfg.embed, padding_idx=PAD)
        self.encoder = nn.GRU(cfg.embed, cfg.hidden // 2, batch_first=True, bidirectional=True)
        self.key = nn.Linear(cfg.hidden, cfg.hidden)
        self.attention = Attention(cfg.hidden)
        self.cell = nn.GRUCell(cfg.embed + cfg.hidden, cfg.hidden)
        self.out = nn.Linear(2 * cfg.hidden, len(CHARS))

    def forward(self, src, lengths, tgt):
        packed = pack_padded_sequence(self.embed(src), lengths, batch_first=True)
        memory, state = self.encoder(packed)
        memory, _ = pad_packed_sequence(memory, batch_first=True)
        state = torch.cat([state[0], state[1]], -1)
        keys, mask = self.key(memory), src == PAD
        inputs = self.embed(F.pad(tgt[:, :-1], (1, 0), value=BOS))
        hidden = []
        for step in range(inputs.size(1)):
            context = self.attention(state, keys, memory, mask)
            state = self.cell(torch.cat([inputs[:, step], context], -1), state)
            hidden.append(torch.cat([state, context], -1))
        return self.out(torch.stack(hidden, 1))


class Callback:
    def on_start(self, trainer): ...
    def on_batch_end(self, trainer, loss): ...
    def on_epoch_end(self, trainer): ...


class GradientGuard(Callback):
    def on_start(self, trainer):
        torch.autograd.set_detect_anomaly(trainer.cfg.debug_grads)


class Progress(Callback):
    def __init__(self):
        self.window = []

    def on_batch_end(self, trainer, loss):
        self.window.append(loss)
        if trainer.step % trainer.cfg.log_every == 0:
            print(f"  step {trainer.step} loss {sum(self.window) / len(self.window):.4f}", flush=True)
            self.window.clear()

    def on_epoch_end(self, trainer):
        print(f"epoch {trainer.epoch} done, lr {trainer.sched.get_last_lr()[0]:.2e}", flush=True)


class Trainer:
    def __init__(self, cfg, model, callbacks):
        self.cfg, self.model, self.callbacks = cfg, model, callbacks
        self.opt = torch.optim.Adam(model.parameters(), lr=cfg.lr, fused=True)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.97)
        self.step = self.epoch = 0

    def emit(self, hook, *args):
        for cb in self.callbacks:
            getattr(cb, hook)(self, *args)

    def fit(self, loader):
        self.emit("on_start")
        for self.epoch in range(self.cfg.epochs):
            for src, lengths, tgt in loader:
                logits = self.model(src, lengths, tgt)
                loss = F.cross_entropy(logits.flatten(0, 1), tgt.flatten(), ignore_index=PAD)
                self.opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip, foreach=True)
                self.opt.step()
                self.step += 1
                self.emit("on_batch_end", loss.item())
            self.sched.step()
            self.emit("on_epoch_end")


if __name__ == "__main__":
    cfg = Config()
    torch.manual_seed(cfg.seed)
    loader = DataLoader(make_pairs(cfg), cfg.batch_size, shuffle=True, collate_fn=collate)
    Trainer(cfg, Seq2Seq(cfg), [GradientGuard(), Progress()]).fit(loader)
