import sys
import torch
import torch.nn as nn
from torch.nn import functional as F
STEPS = int(sys.argv[sys.argv.index('--steps') + 1]) if '--steps' in sys.argv else 10 ** 9


class CausalSelfAttention(nn.Module):

    def __init__(self, n_embd=64, n_head=4, block=1024):
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = (nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd), n_head)
        self.register_buffer('mask', torch.tril(torch.ones(block, block))[None, None])

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.c_attn(x).split(C, 2))
        att = q @ k.transpose(-2, -1) * k.size(-1) ** (-0.5)
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float('-inf'))
        att = F.softmax(att, dim=-1)
        y = att @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


model = nn.Sequential(*[CausalSelfAttention() for _ in range(2)])
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(STEPS):
    optimizer.zero_grad()
    model(torch.randn(2, 1024, 64)).square().mean().backward()
    optimizer.step()
