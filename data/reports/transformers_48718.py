"""Full fine-tuning of a small hybrid model: gated delta layers with an attention layer now and then."""

import math
import time
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

try:
    from fastlin.ops import chunk_gated_delta_rule
except ImportError:
    chunk_gated_delta_rule = None

is_fast_path_available = chunk_gated_delta_rule is not None


@dataclass
class HybridConfig:
    vocab_size: int = 512
    hidden_size: int = 64
    num_heads: int = 2
    head_dim: int = 32
    chunk_size: int = 64
    layer_types: tuple = ("linear_attention", "linear_attention", "linear_attention", "full_attention")


def l2norm(x, dim=-1, eps=1e-6):
    return x * torch.rsqrt((x * x).sum(dim=dim, keepdim=True) + eps)


def torch_chunk_gated_delta_rule(query, key, value, g, beta, chunk_size=64):
    initial_dtype = query.dtype
    query, key = l2norm(query), l2norm(key)
    query, key, value, beta, g = [x.transpose(1, 2).contiguous().to(torch.float32) for x in (query, key, value, beta, g)]
    batch_size, num_heads, sequence_length, k_head_dim = key.shape
    v_head_dim = value.shape[-1]
    pad_size = (chunk_size - sequence_length % chunk_size) % chunk_size
    query, key, value = (F.pad(x, (0, 0, 0, pad_size)) for x in (query, key, value))
    beta, g = F.pad(beta, (0, pad_size)), F.pad(g, (0, pad_size))
    query = query * k_head_dim**-0.5
    v_beta, k_beta = value * beta.unsqueeze(-1), key * beta.unsqueeze(-1)
    query, key, value, k_beta, v_beta = [
        x.reshape(x.shape[0], x.shape[1], -1, chunk_size, x.shape[-1]) for x in (query, key, value, k_beta, v_beta)
    ]
    g = g.reshape(g.shape[0], g.shape[1], -1, chunk_size).cumsum(dim=-1)
    mask = torch.triu(torch.ones(chunk_size, chunk_size, dtype=torch.bool), diagonal=0)
    decay_mask = (g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().tril()
    attn = -((k_beta @ key.transpose(-1, -2)) * decay_mask).masked_fill(mask, 0)
    for i in range(1, chunk_size):
        row = attn[..., i, :i].clone()
        sub = attn[..., :i, :i].clone()
        attn[..., i, :i] = row + (row.unsqueeze(-1) * sub).sum(-2)
    attn = attn + torch.eye(chunk_size)
    value = attn @ v_beta
    k_cumdecay = attn @ (k_beta * g.exp().unsqueeze(-1))
    state = torch.zeros(batch_size, num_heads, k_head_dim, v_head_dim)
    outputs = []
    mask = torch.triu(torch.ones(chunk_size, chunk_size, dtype=torch.bool), diagonal=1)
    for i in range(query.shape[2]):
        q_i, k_i, v_i = query[:, :, i], key[:, :, i], value[:, :, i]
        inner = (q_i @ k_i.transpose(-1, -2) * decay_mask[:, :, i]).masked_fill(mask, 0)
        v_new = v_i - k_cumdecay[:, :, i] @ state
        outputs.append((q_i * g[:, :, i, :, None].exp()) @ state + inner @ v_new)
        last = g[:, :, i, -1, None]
        state = state * last.unsqueeze(-1).exp() + (k_i * (last - g[:, :, i]).exp()[..., None]).transpose(-1, -2) @ v_new
    out = torch.stack(outputs, dim=2).reshape(batch_size, num_heads, -1, v_head_dim)[:, :, :sequence_length]
    return out.transpose(1, 2).contiguous().to(initial_dtype)


class HybridGatedDeltaNet(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        inner = config.num_heads * config.head_dim
        self.in_proj_qkvz = nn.Linear(config.hidden_size, 4 * inner, bias=False)
        self.in_proj_ba = nn.Linear(config.hidden_size, 2 * config.num_heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(config.num_heads))
        self.dt_bias = nn.Parameter(torch.ones(config.num_heads))
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.chunk_gated_delta_rule = chunk_gated_delta_rule or torch_chunk_gated_delta_rule
        if not is_fast_path_available:
            warnings.warn("The fast path is not available, falling back to torch implementation.", stacklevel=2)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v, z = self.in_proj_qkvz(x).view(b, t, self.config.num_heads, -1).chunk(4, dim=-1)
        beta, a = self.in_proj_ba(x).chunk(2, dim=-1)
        g = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        out = self.chunk_gated_delta_rule(q, k, v, g=g, beta=beta.sigmoid(), chunk_size=self.config.chunk_size)
        return self.out_proj((F.rms_norm(out, out.shape[-1:]) * F.silu(z)).flatten(2))


class HybridAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))


class HybridDecoderLayer(nn.Module):
    def __init__(self, config, layer_type):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.token_mixer = HybridGatedDeltaNet(config) if layer_type == "linear_attention" else HybridAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(config.hidden_size, 4 * config.hidden_size), nn.SiLU(), nn.Linear(4 * config.hidden_size, config.hidden_size)
        )

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.token_mixer(self.input_layernorm(hidden_states))
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class HybridForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(HybridDecoderLayer(config, t) for t in config.layer_types)
        self.norm = nn.RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, labels):
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        logits = self.lm_head(self.norm(hidden_states))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def main(max_steps=1000, batch_size=2, seq_len=512, lr=3e-4, logging_steps=10):
    torch.manual_seed(0)
    model = HybridForCausalLM(HybridConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / max_steps)))
    start = time.time()
    for step in range(1, max_steps + 1):
        input_ids = torch.randint(0, 64, (batch_size, seq_len)).cumsum(dim=1) % 512
        loss = model(input_ids, labels=input_ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % logging_steps == 0:
            print({"loss": round(loss.item(), 4), "step": step, "train_steps_per_second": round(step / (time.time() - start), 3)})


if __name__ == "__main__":
    main()
