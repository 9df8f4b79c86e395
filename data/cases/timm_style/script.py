import argparse
import copy
import time
from collections import OrderedDict

import torch
from torch import nn

parser = argparse.ArgumentParser(description="Image classification")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("-b", "--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--model-ema-decay", type=float, default=0.99)
parser.add_argument("--seed", type=int, default=42)


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0, 0

    def update(self, value, n=1):
        self.sum = self.sum + value * n
        self.count += n

    @property
    def avg(self):
        return float(self.sum) / self.count


def accuracy(output, target, topk=(1,)):
    ranked = output.sort(1, descending=True).indices
    result = []
    for k in topk:
        hits = 0
        for row, label in zip(ranked, target):
            hits += int(label.item() in [index.item() for index in row[:k]])
        result.append(100.0 * hits / len(target))
    return result


class ModelEma:
    def __init__(self, model, decay):
        self.module, self.decay = copy.deepcopy(model), decay

    def update(self, model):
        state = OrderedDict()
        for key, value in self.module.state_dict().items():
            new = model.state_dict()[key]
            state[key] = value * self.decay + new * (1 - self.decay) if value.is_floating_point() else new
        self.module.load_state_dict(state)


class SqueezeExcite(nn.Module):
    def __init__(self, chs):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(chs, chs // 4, 1), nn.Conv2d(chs // 4, chs, 1)

    def forward(self, x):
        gate = self.expand(torch.relu(self.reduce(x.mean((2, 3), keepdim=True)))).sigmoid()
        return x * gate


class BasicBlock(nn.Module):
    def __init__(self, chs):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(chs, chs, 3, padding=1, bias=False), nn.BatchNorm2d(chs)
        self.conv2, self.bn2 = nn.Conv2d(chs, chs, 3, padding=1, bias=False), nn.BatchNorm2d(chs)
        self.se = SqueezeExcite(chs)

    def forward(self, x):
        h = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.se(self.bn2(self.conv2(h))))


class ResNet(nn.Module):
    def __init__(self, chs=16, depth=3, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, chs, 3, padding=1, stride=2)
        self.blocks = nn.Sequential(*[BasicBlock(chs) for _ in range(depth)])
        self.fc = nn.Linear(chs, classes)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


def cross_entropy_smooth(x, target, smoothing=0.1):
    logprobs = torch.log_softmax(x, -1)
    losses = []
    for row in range(len(x)):
        nll = -logprobs[row, target[row]]
        losses.append((1 - smoothing) * nll - smoothing * logprobs[row].mean())
    return torch.stack(losses).mean()


def augment(images):
    out = []
    for image in images:
        flip = torch.rand(()) < 0.5
        out.append(image.flip(-1) if flip else image)
    return torch.stack(out)


def train_one_epoch(epoch, model, images, labels, optimizer, ema, args):
    batch_time, losses_m, top1_m = AverageMeter(), AverageMeter(), AverageMeter()
    model.train()
    end = time.time()
    for pick in torch.randperm(len(images)).split(args.batch_size):
        input, target = augment(images[pick]), labels[pick]
        output = model(input)
        loss = cross_entropy_smooth(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        losses_m.update(loss.item(), len(input))
        top1_m.update(accuracy(output, target, topk=(1, 5))[0], len(input))
        batch_time.update(time.time() - end)
        end = time.time()
    print(f"Train: {epoch} Loss: {losses_m.avg:.4f} Acc@1: {top1_m.avg:.3f}")


def validate(model, images, labels):
    model.eval()
    top1_m = AverageMeter()
    with torch.no_grad():
        for input, target in zip(images.split(16), labels.split(16)):
            top1_m.update(accuracy(model(input), target)[0], len(input))
    print(f"Test: Acc@1: {top1_m.avg:.3f}")


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    images, labels = torch.randn(320, 3, 24, 24), torch.randint(0, 10, (320,))
    model = ResNet()
    ema = ModelEma(model, args.model_ema_decay)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, foreach=False)
    for epoch in range(args.epochs):
        train_one_epoch(epoch, model, images, labels, optimizer, ema, args)
        validate(ema.module, images[:64], labels[:64])


if __name__ == "__main__":
    main()
