"""Adapter training on a transformer whose linear layers are stored in eight bits."""

import math
import time
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class TrainConfig:
    def __init__(self):
        self.width = 384
        self.hidden = 1536
        self.num_layers = 6
        self.tokens = 32
        self.batch_size = 1
        self.lora_rank = 16
        self.lora_alpha = 16.0
        self.learning_rate = 3e-4
        self.gradient_checkpointing = True
        self.steps = 1500
        self.block_rows = 32


class LinearW8(nn.Module):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, block_rows: int):
        super().__init__()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("qweight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.block_rows = block_rows

    def weight(self) -> torch.Tensor:
        blocks = []
        for start in range(0, self.qweight.shape[0], self.block_rows):
            q = self.qweight[start : start + self.block_rows].float()
            blocks.append((q * self.scale[start : start + self.block_rows]).to(torch.float32))
        return torch.cat(blocks, dim=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight(), self.bias)


class LoRAModule(nn.Module):
    def __init__(self, base: nn.Module, in_features: int, out_features: int, rank: int, alpha: float):
        super().__init__()
        self.base = base
        self.lora_down = nn.Linear(in_features, rank, bias=False)
        self.lora_up = nn.Linear(rank, out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_up.weight)
        self.factor = alpha / rank

    def forward(self, x):
        return self.base(x) + self.lora_up(self.lora_down(x)) * self.factor


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 6, c // 6).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, config: TrainConfig):
        super().__init__()
        self.time_in = nn.Linear(1, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.hidden) for _ in range(config.num_layers))
        self.proj_out = nn.Linear(config.width, config.width)
        self.gradient_checkpointing = config.gradient_checkpointing

    def forward(self, x, t):
        x = x + self.time_in(t)[:, None]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.gradient_checkpointing else block(x)
        return self.proj_out(x)


def quantize_layers(module: nn.Module, block_rows: int):
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, LinearW8(child.weight.data, child.bias.data, block_rows))
        else:
            quantize_layers(child, block_rows)


def create_lora(module: nn.Module, rank: int, alpha: float) -> Iterable[nn.Parameter]:
    for name, child in list(module.named_children()):
        if isinstance(child, LinearW8):
            out_features, in_features = child.qweight.shape
            wrapped = LoRAModule(child, in_features, out_features, rank, alpha)
            setattr(module, name, wrapped)
            yield from wrapped.lora_down.parameters()
            yield from wrapped.lora_up.parameters()
        else:
            yield from create_lora(child, rank, alpha)


class GenericTrainer:
    def __init__(self, config: TrainConfig):
        self.config = config
        torch.manual_seed(0)
        self.model = Transformer(config).requires_grad_(False)
        quantize_layers(self.model.blocks, config.block_rows)
        self.parameters = list(create_lora(self.model.blocks, config.lora_rank, config.lora_alpha))
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.learning_rate)

    def predict(self, batch):
        noise = torch.randn_like(batch)
        t = torch.rand(len(batch), 1)
        noisy = (1 - t[:, None]) * batch + t[:, None] * noise
        return self.model(noisy, t), noise - batch

    def train(self):
        config, begin = self.config, time.time()
        for step in range(1, config.steps + 1):
            batch = torch.randn(config.batch_size, config.tokens, config.width).cumsum(dim=1) * 0.1
            predicted, target = self.predict(batch)
            loss = nn.functional.mse_loss(predicted, target)
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if step % 25 == 0:
                print(f"step {step}/{config.steps}  loss {loss.item():.4f}  {step / (time.time() - begin):.2f} it/s")


if __name__ == "__main__":
    GenericTrainer(TrainConfig()).train()
