# %% [markdown]
# # Segmentation with a small UNet

# %%
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

FIXED = "--fixed" in sys.argv
STEPS = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 300
TINY = "--tiny" in sys.argv or not torch.cuda.is_available()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES, SIDE, BATCH, BASE = (5, 16, 2, 8) if TINY else (21, 256, 16, 32)
torch.manual_seed(0)
torch.backends.cudnn.benchmark = True


# %%
def twice(i, o):
    layers = []
    for n in (i, o):
        layers += [nn.Conv2d(n, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = twice(3, BASE), twice(BASE, 2 * BASE), twice(2 * BASE, 4 * BASE)
        self.d, self.e = twice(6 * BASE, 2 * BASE), twice(3 * BASE, BASE)
        self.last = nn.Conv2d(BASE, CLASSES, 1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        d = self.d(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        return self.last(self.e(torch.cat([F.interpolate(d, scale_factor=2), a], 1)))


# %% The metric: mean intersection over union
def mean_iou(logits, masks, masks_on_host):
    if FIXED:
        numbers = torch.arange(CLASSES, device=logits.device).view(-1, 1, 1, 1)
        p, t = logits.argmax(1)[None] == numbers, masks[None] == numbers
        return ((p & t).sum((1, 2, 3)) / (p | t).sum((1, 2, 3)).clamp(min=1)).mean()
    predicted = logits.argmax(1).cpu().numpy()
    values = []
    for c in range(CLASSES):
        p, t = predicted == c, masks_on_host == c
        values.append(np.logical_and(p, t).sum() / max(np.logical_or(p, t).sum(), 1))
    return float(np.mean(values))


# %% Data: colours that tell the class, with noise
masks = torch.randint(CLASSES, (8, BATCH, SIDE // 8, SIDE // 8)).repeat_interleave(8, 2).repeat_interleave(8, 3)
images = torch.randn(CLASSES, 3)[masks].permute(0, 1, 4, 2, 3) + 0.5 * torch.randn(8, BATCH, 3, SIDE, SIDE)
on_host, masks = masks.numpy(), masks.to(DEVICE)
images = [batch.to(DEVICE, memory_format=torch.channels_last) for batch in images]

# %% Training
model = UNet().to(DEVICE, memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
history = []
for step in range(STEPS):
    x, y = images[step % 8], masks[step % 8]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        logits = model(x)
        loss = F.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(mean_iou(logits.detach(), y, on_host[step % 8]))

# %%
print("mean IoU", float(history[-1]))
print("loss", loss.item())
