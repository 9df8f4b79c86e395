# A GPT on bytes, every part written out.
import math
import sys

import torch
import torch.nn as nn
from torch.nn import functional as F

# -----------------------------------------------------------------------------
device = "cuda" if torch.cuda.is_available() else "cpu"
fixed = "--fixed" in sys.argv
max_iters = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 260
if "--tiny" in sys.argv or device == "cpu":
    batch_size, block_size, n_layer, n_head, n_embd = 2, 16, 2, 2, 32
else:
    batch_size, block_size, n_layer, n_head, n_embd = 4, 2048, 6, 16, 1024
torch.manual_seed(1337)
# -----------------------------------------------------------------------------


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("future", torch.ones(block_size, block_size).triu(1).bool())

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, n_head, C // n_head).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        if fixed:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
            scores = scores.masked_fill(self.future[:T, :T], float("-inf"))
            weights = F.softmax(scores, dim=-1)
            y = weights @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(n_embd), CausalSelfAttention(), nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.Sequential(*[Block() for _ in range(n_layer)])
        self.ln_f, self.head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 256, bias=False)

    def forward(self, idx, targets):
        x = self.h(self.wte(idx) + self.wpe.weight[: idx.shape[1]])
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1), targets.flatten())


data = torch.randint(256, (64 * block_size + 1,), device=device)
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for it in range(max_iters):
    start = it % (64 // batch_size) * batch_size * block_size
    chunk = data[start : start + batch_size * block_size + 1]
    x, y = chunk[:-1].view(batch_size, block_size), chunk[1:].view(batch_size, block_size)
    with torch.autocast(device, torch.bfloat16):
        loss = model(x, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
print("loss", loss.item())
