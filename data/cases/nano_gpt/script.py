import math
import sys

import torch
import torch.nn as nn
from torch.nn import functional as F

max_iters = int(sys.argv[1])
batch_size, block_size, n_layer, n_head, n_embd, dropout = 8, 256, 2, 4, 64, 0.0
vocab_size, learning_rate, min_lr, warmup_iters, grad_clip = 64, 1e-3, 1e-4, 5, 1.0
eval_interval, eval_iters = 10, 2

torch.manual_seed(1337)
transition = torch.softmax(torch.randn(vocab_size, vocab_size) * 2, -1)


def write_corpus(length):
    """Characters of a Markov chain."""
    noise = torch.rand(length)
    cumulative = transition.cumsum(-1)
    text = torch.zeros(length, dtype=torch.long)
    for i in range(1, length):
        text[i] = torch.searchsorted(cumulative[text[i - 1]], noise[i]).clamp(max=vocab_size - 1)
    return text


corpus = write_corpus(6000)
train_data, val_data = corpus[:5000], corpus[5000:]


def get_batch(split):
    data = train_data if split == "train" else val_data
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.tensor(data[i : i + block_size].tolist()) for i in ix])
    y = torch.stack([torch.tensor(data[i + 1 : i + 1 + block_size].tolist()) for i in ix])
    return x, y


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(n_embd, dim=2)
        k = k.view(B, T, n_head, C // n_head).transpose(1, 2)
        q = q.view(B, T, n_head, C // n_head).transpose(1, 2)
        v = v.view(B, T, n_head, C // n_head).transpose(1, 2)
        mask = torch.zeros(T, T)
        for row in range(T):
            mask[row, row + 1 :] = float("-inf")
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att + mask, dim=-1)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)
        self.c_proj = nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(n_embd), CausalSelfAttention()
        self.ln_2, self.mlp = nn.LayerNorm(n_embd), MLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), foreach=False)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(eval_iters)
    for k in range(eval_iters):
        x, y = get_batch("val")
        losses[k] = model(x, y)[1].item()
    model.train()
    return losses.mean()


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / max(max_iters - warmup_iters, 1)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def clip(parameters):
    total = math.sqrt(sum(p.grad.pow(2).sum().item() for p in parameters))
    if total > grad_clip:
        for p in parameters:
            p.grad *= grad_clip / (total + 1e-6)


for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % eval_interval == eval_interval - 1:
        print(f"step {it}: val loss {estimate_loss():.4f}")
    x, y = get_batch("train")
    logits, loss = model(x, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    clip(list(model.parameters()))
    optimizer.step()
