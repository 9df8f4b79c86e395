"""Super-resolution: twice as many pixels in each direction, by residual blocks of convolutions without norms."""

from argparse import ArgumentParser

import torch
from torch import nn
from torch.nn import functional as F


def get_args():
    parser = ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="channels last")
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--patch", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    if args.tiny or not torch.cuda.is_available():
        args.blocks, args.features, args.patch, args.batch_size = 2, 8, 8, 2
    return args


class ResBlock(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(features, features, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(features, features, 3, padding=1),
        )

    def forward(self, x):
        return x + self.body(x)


def build(args):
    return nn.Sequential(
        nn.Conv2d(3, args.features, 3, padding=1),
        *[ResBlock(args.features) for _ in range(args.blocks)],
        nn.Conv2d(args.features, 4 * 3, 3, padding=1),
        nn.PixelShuffle(2),
    )


def main():
    args = get_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layout = torch.channels_last if args.fixed else torch.contiguous_format
    net = build(args).to(device, memory_format=layout)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-4, fused=True)
    side = 2 * args.patch
    sharp = [torch.rand(args.batch_size, 3, side, side, device=device) for _ in range(4)]
    small = [F.avg_pool2d(image, 2).contiguous(memory_format=layout) for image in sharp]
    for it in range(args.steps):
        with torch.autocast(device, dtype=torch.bfloat16):
            out = net(small[it % 4])
        loss = F.l1_loss(out.float(), sharp[it % 4])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if (it + 1) % 100 == 0:
            print(f"iteration {it + 1}/{args.steps} L1 {loss.item():.4f}")
    print("loss", loss.item())


if __name__ == "__main__":
    main()
