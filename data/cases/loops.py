"""A clean training loop, and the same with one inefficiency planted.

The line that plants NAME ends in the comment `plant NAME`, so that a test can tell whether a finding points there.
"""

import time
from collections.abc import Set
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import DataLoader, Dataset

# What is planted, and the finding that it must cause.
ON_CPU = {
    "item": "host synchronisation",
    "cpu": "host synchronisation",
    "boolean index": "host synchronisation",
    "slow loader": "waiting for the loader",
    "width 255": "unaligned sizes",
    "attention": "attention from matmul and softmax",
    "foreach optimizer": "unfused optimizer",
    "loop optimizer": "unfused optimizer",
    "zeroed": "gradients zeroed, not dropped",
    "empty cache": "memory returned and reserved again",
    "validation": "graph kept in evaluation",
    "dead projection": "result never used",
    "mask": "repeated constant work",
    "positions": "repeated constant work",
    "separate": "separate projections of one input",
    "one hot": "one-hot product",
    "diagonal": "product with a diagonal matrix",
    "deterministic": "deterministic cuDNN",
    "pairs": "pairs by broadcasting",
}
ON_CUDA_ONLY = {
    "pageable": "copies from pageable memory",
    "fp32": "fp32 products",
    "tiny kernels": "host slower than the device",
    "unbenchmarked": "unbenchmarked cuDNN",
}
HEADS, CLASSES, PATCH = 3, 8, 4  # every width here is three heads


class Images(Dataset):
    """Whole batches, made beforehand."""

    def __init__(self, count: int, batch: int, side: int, plants: Set[str]):
        self.x = torch.randn(count, batch, 3, side, side)
        self.y = torch.randint(CLASSES, (count, batch))
        self.plants = plants

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        if "slow loader" in self.plants:
            time.sleep(0.05)  # plant slow loader
        return self.x[i], self.y[i]


class Block(nn.Module):
    def __init__(self, width: int, plants: Set[str]):
        super().__init__()
        self.plants = plants
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, C = x.shape
        h = self.norms[0](x)
        if "separate" in self.plants:
            q, k, v = (part(h) for part in self.parts)  # plant separate
        else:
            q, k, v = self.qkv(h).chunk(3, dim=-1)
        q, k, v = (t.view(B, T, HEADS, C // HEADS).transpose(1, 2) for t in (q, k, v))  # (B, heads, T, C / heads)
        mask = None
        if "mask" in self.plants:
            mask = torch.triu(torch.ones(T, T, device=x.device), 1) == 0  # plant mask
        if "attention" in self.plants:
            a = (q @ k.transpose(-2, -1) / (C // HEADS) ** 0.5).softmax(-1) @ v  # plant attention
        else:
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(a.transpose(1, 2).reshape(B, T, C))
        if "dead projection" in self.plants:
            self.parts[0](x)  # plant dead projection
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, width: int, depth: int, plants: Set[str]):
        super().__init__()
        self.plants = plants
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.blocks = nn.Sequential(*(Block(width, plants) for _ in range(depth)))
        self.head = nn.Linear(width, CLASSES)
        self.rows = nn.Parameter(torch.zeros(4000, width)) if plants & {"one hot", "diagonal"} else None

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)  # (B, T, C)
        if "positions" in self.plants:
            x = x + positions(x.shape[1], x.shape[2], x.device)
        if "tiny kernels" in self.plants:
            for _ in range(1500):
                x[0, 0].detach().mul(1)  # plant tiny kernels
        if "diagonal" in self.plants:
            x = x + (torch.diag(self.rows[:, 0]) @ self.rows)[: x.shape[1]]  # plant diagonal
        if "one hot" in self.plants:
            ids = torch.arange(x.shape[1], device=x.device)
            x = x + F.one_hot(ids, len(self.rows)).float() @ self.rows  # plant one hot
        if "pairs" in self.plants:
            rows = x.flatten(0, 1)[:128]
            x = x + F.cosine_similarity(rows[:, None], rows[None], dim=-1).mean()  # plant pairs
        return self.head(self.blocks(x).mean(1))


def positions(length: int, width: int, device) -> torch.Tensor:
    place = torch.arange(length, device=device).unsqueeze(1)  # plant positions
    rate = torch.exp(torch.arange(0, width, 2, device=device) * -0.1)
    return torch.sin(place * rate).repeat(1, 2)


def precision(x, plants: Set[str]):
    return torch.autocast("cuda", torch.bfloat16) if x.is_cuda and "fp32" not in plants else nullcontext()


def train_step(model, optimizer, x, y, plants: Set[str]) -> None:
    with precision(x, plants):
        loss = F.cross_entropy(model(x), y)
    if "item" in plants:
        loss.item()  # plant item
    if "cpu" in plants:
        loss.detach().cpu()  # plant cpu
    if "boolean index" in plants:
        y[y > 3].sum()  # plant boolean index
    loss.backward()
    optimizer.step()  # plant foreach optimizer, loop optimizer
    optimizer.zero_grad(set_to_none="zeroed" not in plants)  # plant zeroed
    if "empty cache" in plants:
        torch.cuda.empty_cache()  # plant empty cache


def validate(model, x, plants: Set[str]) -> None:
    graph = nullcontext() if "validation" in plants else torch.no_grad()
    with graph, record_function("validation"), precision(x, plants):
        model(x)


@contextmanager
def cudnn(plants: Set[str]):
    flags = {"benchmark": not plants & {"unbenchmarked", "deterministic"}, "deterministic": "deterministic" in plants}
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True, **flags):
        yield


def run(*plants: str, device: str = "cpu", steps: int = 3, stack: bool = True, shapes: bool = True) -> profile:
    """Profile the loop with something planted, or clean."""
    plants = frozenset(plants)
    cuda = device == "cuda"
    batch, side, depth, width = (64, 64, 2, 768) if cuda else (16, 16, 1, 192)
    if "width 255" in plants:
        width = 765 if cuda else 255
    model = Model(width, depth, plants).to(device)
    slow = {"foreach optimizer": {"foreach": True}, "loop optimizer": {"foreach": False}}
    optimizer = torch.optim.AdamW(model.parameters(), **next((slow[p] for p in plants if p in slow), {"fused": True}))
    images = Images(steps + 3, batch, side, plants)
    loader = DataLoader(images, batch_size=None, pin_memory=cuda and "pageable" not in plants)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    record = schedule(wait=1, warmup=1, active=steps, repeat=1)
    with cudnn(plants), profile(activities=activities, schedule=record, with_stack=stack, record_shapes=shapes) as prof:
        for x, y in loader:
            x, y = (t.to(device, non_blocking=True) for t in (x, y))  # plant pageable
            train_step(model, optimizer, x, y, plants)
            validate(model, x, plants)
            prof.step()
    return prof
