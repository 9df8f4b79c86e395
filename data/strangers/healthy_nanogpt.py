"""
Character-level GPT on a generated corpus. Edit the globals below, then run `python healthy_nanogpt.py`.
"""
import math
import os
import tempfile
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

# -----------------------------------------------------------------------------
eval_interval = 300
eval_iters = 5
log_interval = 10
batch_size = 16
gradient_accumulation_steps = 2
block_size = 96
n_layer, n_head, n_embd, dropout = 3, 4, 128, 0.0
learning_rate, min_lr = 1e-3, 1e-4
max_iters, warmup_iters = 1500, 50
weight_decay, beta1, beta2, grad_clip = 1e-1, 0.9, 0.99, 1.0
seed = 1337
# -----------------------------------------------------------------------------


def prepare(path, n_chars=400_000):
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abcdefghijklmnoprstuvwy"), rng.integers(2, 8))) for _ in range(600)]
    picks = rng.zipf(1.25, n_chars // 5) % len(words)
    text = " ".join(words[k] + ("." if k % 17 == 0 else "") for k in picks)[:n_chars]
    stoi = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = np.array([stoi[c] for c in text], dtype=np.uint16)
    cut = int(0.9 * len(ids))
    ids[:cut].tofile(os.path.join(path, "train.bin"))
    ids[cut:].tofile(os.path.join(path, "val.bin"))
    return len(stoi)


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.n_head, self.dropout = config.n_head, config.dropout

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.mlp = nn.Sequential(nn.Linear(config.n_embd, 4 * config.n_embd), nn.GELU(approximate="tanh"),
                                 nn.Linear(4 * config.n_embd, config.n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.register_buffer("pos", torch.arange(config.block_size), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(self.pos[: idx.size(1)])
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), fused=True)


torch.manual_seed(seed)
data_dir = tempfile.mkdtemp(prefix="char_")
vocab_size = prepare(data_dir)
data = {s: np.memmap(os.path.join(data_dir, f"{s}.bin"), dtype=np.uint16, mode="r") for s in ("train", "val")}
offsets = np.arange(block_size + 1)


def get_batch(split):
    ix = np.random.randint(0, len(data[split]) - block_size - 1, batch_size)
    chunk = torch.from_numpy(data[split][ix[:, None] + offsets].astype(np.int64))
    return chunk[:, :-1], chunk[:, 1:].contiguous()


@torch.no_grad()
def estimate_loss():
    model.eval()
    out = {s: sum(model(*get_batch(s)).item() for _ in range(eval_iters)) / eval_iters for s in ("train", "val")}
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT(GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, dropout))
optimizer = model.configure_optimizers()
t0 = time.time()
for iter_num in range(max_iters):
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if iter_num and iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
    for micro_step in range(gradient_accumulation_steps):
        loss = model(*get_batch("train")) / gradient_accumulation_steps
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0:
        dt, t0 = time.time() - t0, time.time()
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}, time {dt * 1000:.0f}ms", flush=True)
