"""Phone recognition with CTC; a Brain class with compute_forward / compute_objectives."""
import enum
import math
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

HPARAMS = dict(
    seed=1986, sample_rate=8000, n_phones=20, n_utts=1200, batch_size=24, epochs=40, lr=1e-3,
    n_fft=256, hop=80, win=200, n_mels=40, cnn=32, rnn=128, rnn_layers=2, snr_db=(10, 30), max_grad_norm=5.0)


class Stage(enum.Enum):
    TRAIN = 1
    VALID = 2


class Fbank(nn.Module):
    """Batched log-mel front end; window and filters are buffers."""

    def __init__(self, hp):
        super().__init__()
        self.n_fft, self.hop, self.win = hp["n_fft"], hp["hop"], hp["win"]
        self.register_buffer("window", torch.hamming_window(self.win))
        top = 2595 * math.log10(1 + hp["sample_rate"] / 2 / 700)
        hz = 700 * (10 ** (torch.linspace(0, top, hp["n_mels"] + 2) / 2595) - 1)
        bins = torch.linspace(0, hp["sample_rate"] / 2, self.n_fft // 2 + 1)
        rise = (bins - hz[:-2, None]) / (hz[1:-1] - hz[:-2])[:, None]
        fall = (hz[2:, None] - bins) / (hz[2:] - hz[1:-1])[:, None]
        self.register_buffer("filters", torch.minimum(rise, fall).clamp_min(0))

    def forward(self, wavs):
        spec = torch.stft(wavs, self.n_fft, self.hop, self.win, self.window, return_complex=True)
        power = torch.view_as_real(spec).square().sum(-1)
        feats = torch.log(self.filters @ power + 1e-5)
        return feats - feats.mean((1, 2), keepdim=True)


class CRDNN(nn.Module):
    def __init__(self, hp):
        super().__init__()
        c = hp["cnn"]
        self.cnn = nn.Sequential(
            nn.Conv2d(1, c, 3, stride=(2, 1), padding=1), nn.BatchNorm2d(c), nn.LeakyReLU(),
            nn.Conv2d(c, c, 3, stride=2, padding=1), nn.BatchNorm2d(c), nn.LeakyReLU())
        self.rnn = nn.GRU(c * hp["n_mels"] // 4, hp["rnn"], hp["rnn_layers"], bidirectional=True, batch_first=True)
        self.dnn = nn.Sequential(nn.Linear(2 * hp["rnn"], hp["rnn"]), nn.LeakyReLU(), nn.Linear(hp["rnn"], hp["n_phones"] + 1))

    def forward(self, feats):
        x = self.cnn(feats[:, None])
        x, _ = self.rnn(x.flatten(1, 2).transpose(1, 2))
        return self.dnn(x)


class Brain:
    def __init__(self, modules, opt_class, hparams):
        self.modules, self.hparams = nn.ModuleDict(modules), hparams
        self.optimizer = opt_class(self.modules.parameters())
        self.step = 0

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.modules.parameters(), self.hparams["max_grad_norm"], foreach=True)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def evaluate_batch(self, batch):
        return self.compute_objectives(self.compute_forward(batch, Stage.VALID), batch, Stage.VALID).item()

    def fit(self, epochs, train_set, valid_set):
        for epoch in range(1, epochs + 1):
            self.modules.train()
            start, avg = time.time(), 0.0
            for n, batch in enumerate(train_set, 1):
                avg += (self.fit_batch(batch) - avg) / n
            print(f"epoch: {epoch}, steps: {self.step} - train loss: {avg:.3f} ({time.time() - start:.1f}s)", flush=True)
            if epoch % 4 == 0:
                self.modules.eval()
                losses = [self.evaluate_batch(b) for b in valid_set]
                print(f"  valid loss: {np.mean(losses):.3f}, PER: {self.errors():.2f}", flush=True)


class PhoneBrain(Brain):
    blank = 0

    def add_noise(self, wavs):
        low, high = self.hparams["snr_db"]
        snr = torch.empty(len(wavs), 1).uniform_(low, high)
        power = wavs.square().mean(1, keepdim=True)
        return wavs + torch.randn_like(wavs) * (power * 10 ** (-snr / 10)).sqrt()

    def compute_forward(self, batch, stage):
        wavs = self.add_noise(batch["wavs"]) if stage is Stage.TRAIN else batch["wavs"]
        return self.modules["model"](self.modules["fbank"](wavs)).log_softmax(-1)

    def compute_objectives(self, logp, batch, stage):
        lengths = (batch["wav_lens"] * logp.size(1)).ceil().long()
        loss = F.ctc_loss(logp.transpose(0, 1), batch["phones"], lengths, batch["phone_lens"], self.blank, zero_infinity=True)
        if stage is Stage.VALID:
            best = logp.argmax(-1)
            keep = (best != self.blank) & (best != F.pad(best, (1, 0), value=self.blank)[:, :-1])
            self.last = (keep.sum(1) - batch["phone_lens"]).abs().sum().item() / batch["phone_lens"].sum().item()
        return loss

    def errors(self):
        return self.last


class BatchedCorpus:
    """Length-sorted utterances, zero-padded to the longest of their batch; order shuffled by batch."""

    def __init__(self, hp, n, seed, shuffle):
        rng = np.random.default_rng(seed)
        formants = np.random.default_rng(5).uniform(200, 3500, (hp["n_phones"], 2))
        utts = []
        for _ in range(n):
            phones = rng.integers(0, hp["n_phones"], rng.integers(5, 11))
            spans = rng.integers(700, 1300, len(phones))
            f = np.repeat(formants[phones], spans, 0)
            wav = np.sin(2 * np.pi * np.cumsum(f, 0) / hp["sample_rate"]).sum(1)
            utts.append((wav.astype(np.float32), phones + 1))
        utts.sort(key=lambda u: len(u[0]))
        bs = hp["batch_size"]
        self.batches = [self.pad(utts[i : i + bs]) for i in range(0, n, bs)]
        self.shuffle = shuffle

    @staticmethod
    def pad(utts):
        width = max(len(w) for w, _ in utts)
        return {
            "wavs": torch.from_numpy(np.stack([np.pad(w, (0, width - len(w))) for w, _ in utts])),
            "wav_lens": torch.tensor([len(w) / width for w, _ in utts]),
            "phones": torch.from_numpy(np.concatenate([p for _, p in utts])),
            "phone_lens": torch.tensor([len(p) for _, p in utts]),
        }

    def __iter__(self):
        order = np.random.permutation(len(self.batches)) if self.shuffle else range(len(self.batches))
        return (self.batches[i] for i in order)


if __name__ == "__main__":
    torch.manual_seed(HPARAMS["seed"])
    np.random.seed(HPARAMS["seed"])
    brain = PhoneBrain({"fbank": Fbank(HPARAMS), "model": CRDNN(HPARAMS)},
                       lambda p: torch.optim.Adam(p, lr=HPARAMS["lr"], fused=True), HPARAMS)
    brain.fit(HPARAMS["epochs"], BatchedCorpus(HPARAMS, HPARAMS["n_utts"], 0, True),
              BatchedCorpus(HPARAMS, 48, 1, False))
