"""Keyword spotting on field recordings (11.025 kHz) with a small DS-CNN."""
import argparse
import math
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--n-mels", type=int, default=48)
parser.add_argument("--rec-rate", type=int, default=11025)
parser.add_argument("--sample-rate", type=int, default=16000)
parser.add_argument("--n-utts", type=int, default=640)
parser.add_argument("--seed", type=int, default=7)
args = parser.parse_args()

KEYWORDS = ["up", "down", "left", "right", "stop", "go", "yes", "no"]


def record_fake_utterances(n, rate, rng):
    t = np.arange(int(rate * 1.1)) / rate
    labels = rng.integers(0, len(KEYWORDS), size=n)
    waves = np.empty((n, t.size), dtype=np.float32)
    for i, k in enumerate(labels):
        f0 = 140 + 45 * k + rng.normal(0, 6)
        glide = 1 + 0.3 * np.sin(2 * np.pi * (1 + k % 3) * t)
        envelope = np.exp(-((t - 0.55) ** 2) / 0.05)
        waves[i] = envelope * np.sin(2 * np.pi * f0 * glide * t) + 0.05 * rng.standard_normal(t.size)
    return torch.from_numpy(waves), torch.from_numpy(labels)


def sinc_kernel(orig, new, zeros=6, rolloff=0.99):
    g = math.gcd(orig, new)
    orig, new = orig // g, new // g
    base = min(orig, new) * rolloff
    width = math.ceil(zeros * orig / base)
    idx = torch.arange(-width, width + orig, dtype=torch.float64)[None] / orig
    t = torch.arange(0, -new, -1, dtype=torch.float64)[:, None] / new + idx
    t = (t * base).clamp_(-zeros, zeros)
    window = torch.cos(t * math.pi / zeros / 2) ** 2
    t = t * math.pi
    kernel = torch.where(t == 0, torch.ones_like(t), t.sin() / t) * window * (base / orig)
    return kernel.float()[:, None], width, orig, new


def resample(wav, orig_rate, new_rate):
    kernel, width, orig, new = sinc_kernel(orig_rate, new_rate)
    n_out = math.ceil(new * wav.numel() / orig)
    wav = F.pad(wav[None, None], (width, width + orig))
    out = F.conv1d(wav, kernel, stride=orig)
    return out.transpose(1, 2).reshape(-1)[:n_out]


def mel_matrix(rate, n_fft, n_mels):
    top = 2595 * math.log10(1 + rate / 2 / 700)
    hz = 700 * (10 ** (torch.linspace(0, top, n_mels + 2) / 2595) - 1)
    bins = torch.linspace(0, rate / 2, n_fft // 2 + 1)
    up = (bins - hz[:-2, None]) / (hz[1:-1] - hz[:-2])[:, None]
    down = (hz[2:, None] - bins) / (hz[2:] - hz[1:-1])[:, None]
    return torch.minimum(up, down).clamp_min(0)


class Keywords(Dataset):
    def __init__(self, waves, labels, train):
        self.waves, self.labels, self.train = waves, labels, train
        self.window = torch.hann_window(400)
        self.mels = mel_matrix(args.sample_rate, 512, args.n_mels)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        wav = self.waves[i]
        length = args.rec_rate
        start = int(torch.randint(0, wav.numel() - length, ())) if self.train else 0
        wav = wav[start : start + length]
        wav = resample(wav, args.rec_rate, args.sample_rate)
        if self.train:
            wav = wav * float(torch.empty(()).uniform_(0.6, 1.3))
        spec = torch.stft(wav, 512, 160, 400, self.window, return_complex=True).abs().square()
        return torch.log(self.mels @ spec + 1e-6), self.labels[i]


class DSCNN(nn.Module):
    def __init__(self, width=32, blocks=2):
        super().__init__()
        layers = [nn.Conv2d(1, width, (10, 4), stride=2, padding=(5, 1)), nn.BatchNorm2d(width), nn.ReLU()]
        for _ in range(blocks):
            layers += [
                nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            ]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, len(KEYWORDS))

    def forward(self, x):
        return self.head(self.body(x[:, None]).mean((2, 3)))


torch.manual_seed(args.seed)
rng = np.random.default_rng(args.seed)
waves, labels = record_fake_utterances(args.n_utts, args.rec_rate, rng)
n_val = args.n_utts // 10
train_loader = DataLoader(Keywords(waves[n_val:], labels[n_val:], True), batch_size=args.batch_size,
                          shuffle=True, drop_last=True)
val_loader = DataLoader(Keywords(waves[:n_val], labels[:n_val], False), batch_size=args.batch_size)

model = DSCNN()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-2, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train_loader))

for epoch in range(args.epochs):
    model.train()
    tic, running = time.time(), 0.0
    for x, y in train_loader:
        loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        running += loss.item()
    line = f"epoch {epoch:3d}  loss {running / len(train_loader):.3f}  {time.time() - tic:.1f}s"
    if epoch % 10 == 9:
        model.eval()
        with torch.no_grad():
            hits = sum((model(x).argmax(1) == y).sum().item() for x, y in val_loader)
        line += f"  val acc {hits / n_val:.3f}"
    print(line, flush=True)
