"""The classic U-Net, which the segmentation task trains."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UNet(nn.Module):
    """Images (B, in_channels, H, W) to logits (B, out_channels, H, W), for any H and W of at least 2**depth.

    Max-pooled `depth` times and up-sampled again, with `width`·2^level channels at each level and skip connections from
    encoder to decoder. Where a size is odd, up-sampling gives one pixel less, and the last row or column is repeated.
    At 64 channels and depth 4: 31 M parameters, 96 GFLOP forward for a 256×256 image.
    """

    def __init__(self, in_channels: int = 3, out_channels: int = 1, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.first = _double_convolution(in_channels, width)
        self.down = nn.ModuleList(_double_convolution(a, b) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, stride=2) for a in reversed(widths[:-1]))
        self.merge = nn.ModuleList(_double_convolution(2 * a, a) for a in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, out_channels, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """He's initialisation; for transposed convolutions, which no ReLU follows, deviation 1/√(channels)."""
        for module in self.modules():
            if isinstance(module, nn.ConvTranspose2d):
                nn.init.normal_(module.weight, std=module.in_channels**-0.5)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu" if module.kernel_size[0] > 1 else "linear")
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)  # (B, width, H, W)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))  # twice the channels, half of H and W
        for up, merge in zip(self.up, self.merge, strict=True):
            skip = skips.pop()
            x = _grow(up(x), skip.shape[2], skip.shape[3])
            x = merge(torch.cat([skip, x], dim=1))  # half the channels, twice H and W
        return self.head(x)


def _double_convolution(in_channels: int, out_channels: int) -> nn.Sequential:
    """3×3 convolution, batch norm, ReLU, twice. No bias: the norm would subtract it."""
    layers = []
    for channels in (in_channels, out_channels):
        layers += [nn.Conv2d(channels, out_channels, 3, padding=1, bias=False), nn.BatchNorm2d(out_channels)]
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


def _grow(x: Tensor, height: int, width: int) -> Tensor:
    """x with its last row and column repeated up to height and width."""
    missing = height - x.shape[2], width - x.shape[3]
    return F.pad(x, (0, missing[1], 0, missing[0]), mode="replicate") if any(missing) else x
