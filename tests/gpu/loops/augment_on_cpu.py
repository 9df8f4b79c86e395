"""Photos are flipped, cropped and jittered on the CPU, one by one, while the GPU waits."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
DEVICE = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cuda"
STEPS = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 150
BATCH, SIDE = (128, 192) if DEVICE == "cuda" else (4, 72)


def augment_one(photo):
    top, left = torch.randint(0, 32, (2,)).tolist()
    photo = photo[:, top : top + SIDE - 32, left : left + SIDE - 32]
    if torch.rand(()) < 0.5:
        photo = photo.flip(2)
    photo = photo * (0.8 + 0.4 * torch.rand(3, 1, 1))
    return F.avg_pool2d(photo[None], 3, 1, 1)[0]


def augment_all(photos):
    top, left = torch.randint(0, 32, (2,)).tolist()
    photos = photos[:, :, top : top + SIDE - 32, left : left + SIDE - 32]
    flipped = torch.rand(len(photos), 1, 1, 1, device=photos.device) < 0.5
    photos = torch.where(flipped, photos.flip(3), photos)
    photos = photos * (0.8 + 0.4 * torch.rand(len(photos), 3, 1, 1, device=photos.device))
    return F.avg_pool2d(photos, 3, 1, 1)


torch.manual_seed(0)
photos = torch.rand(BATCH, 3, SIDE, SIDE)
labels = torch.randint(0, 10, (BATCH,), device=DEVICE)
stack = [nn.Conv2d(3, 64, 7, 4), nn.ReLU(), nn.Conv2d(64, 128, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
net = nn.Sequential(*stack, nn.Flatten(), nn.Linear(128, 10)).to(DEVICE)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
on_device = photos.to(DEVICE)
for _ in range(STEPS):
    x = augment_all(on_device) if FIXED else torch.stack([augment_one(photo) for photo in photos]).to(DEVICE)
    loss = F.cross_entropy(net(x), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
