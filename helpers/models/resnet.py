"""ResNet for images: residual blocks of convolutions with batch norm, as in torchvision's `resnet18`.

No control flow depends on the data: it can be traced, scripted and exported.
"""

from collections.abc import Sequence

from torch import Tensor, nn

# Sizes by name; other arguments have the constructor's defaults.
PRESETS = {
    "tiny": {"blocks": (1, 1), "width": 8, "classes": 10},
    "resnet-18": {"blocks": (2, 2, 2, 2), "width": 64, "classes": 1000},
}


class ResNet(nn.Module):
    """Images (B, 3, H, W) to logits (B, classes).

    A 7×7 convolution and max-pooling reduce height and width to a quarter. Stages of blocks follow; each but the first
    halves them again and doubles the channels. Global average pooling and a linear head end it.

    resnet-18 has 11,689,512 parameters and costs 3.6 GFLOP (1.81 G multiply-adds) for a 224×224 image, nearly all of it
    in the 3×3 convolutions. Forward reads and writes some 90 MB of activations in fp32, two thirds of it in batch
    norms, ReLUs and additions, which a compiler can fuse with the convolution before them.

    Convolutions are initialised by He's method (normal, fan out), which preserves the size of gradients.
    """

    def __init__(self, blocks: Sequence[int] = (2, 2, 2, 2), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        widths = [width * 2**stage for stage in range(len(blocks))]
        self.stages = nn.Sequential(
            *(stage(widths[max(i - 1, 0)], widths[i], count, 1 if i == 0 else 2) for i, count in enumerate(blocks))
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[-1], classes)
        self.reset_parameters()

    @classmethod
    def from_name(cls, name: str, **changes) -> "ResNet":
        """The model of a preset, with changes: `from_name("resnet-18", classes=10)`."""
        return cls(**PRESETS[name] | changes)

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))  # (B, C, H/4, W/4)
        x = self.avgpool(self.stages(x))  # (B, C·2^(stages−1), 1, 1)
        return self.fc(x.flatten(1))  # (B, classes)


def stage(before: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    """Blocks of `width` channels; the first maps from `before` channels and down-samples by `stride`."""
    return nn.Sequential(Block(before, width, stride), *(Block(width, width, 1) for _ in range(blocks - 1)))


class Block(nn.Module):
    """relu(x + conv(relu(conv(x)))), a batch norm after each convolution: (B, C, H, W) to (B, D, H/s, W/s).

    If the shape changes, a 1×1 convolution with a batch norm maps x to the new shape.
    """

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.downsample(x))
