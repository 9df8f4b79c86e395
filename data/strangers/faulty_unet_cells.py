"""Cell segmentation with border-weighted cross entropy (U-Net, Ronneberger et al.)."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy import ndimage as ndi
from torch.utils.data import DataLoader, Dataset

SIZE, N_IMAGES, BATCH, EPOCHS = 96, 120, 6, 100
W0, SIGMA = 10.0, 4.0


def draw_cells(rng, size):
    yy, xx = np.mgrid[:size, :size]
    labels = np.zeros((size, size), np.int32)
    image = rng.normal(0.1, 0.05, (size, size))
    for k in range(1, rng.integers(18, 28)):
        cy, cx = rng.uniform(5, size - 5, 2)
        a, b = rng.uniform(5, 9, 2)
        theta = rng.uniform(0, np.pi)
        u = (yy - cy) * np.cos(theta) + (xx - cx) * np.sin(theta)
        v = -(yy - cy) * np.sin(theta) + (xx - cx) * np.cos(theta)
        inside = ((u / a) ** 2 + (v / b) ** 2 < 1) & (labels == 0)
        labels[inside] = k
        image[inside] += rng.uniform(0.3, 0.7)
    return ndi.gaussian_filter(image, 1.0).astype(np.float32), labels


def border_weights(labels):
    ids = [i for i in np.unique(labels) if i != 0]
    dist = np.stack([ndi.distance_transform_edt(labels != i) for i in ids])
    dist.sort(axis=0)
    near = dist[0] + dist[min(1, len(ids) - 1)]
    w = W0 * np.exp(-(near ** 2) / (2 * SIGMA ** 2)) * (labels == 0)
    fg = (labels > 0).mean()
    return (w + np.where(labels > 0, 1 / fg, 1 / (1 - fg)) * 0.5).astype(np.float32)


class CellDataset(Dataset):
    def __init__(self, images, labels, augment=False):
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image, labels = self.images[i], self.labels[i]
        weights = border_weights(labels)
        mask = (labels > 0).astype(np.int64)
        if self.augment:
            k, flip = np.random.randint(4), np.random.rand() < 0.5
            image, mask, weights = (np.rot90(a, k) for a in (image, mask, weights))
            if flip:
                image, mask, weights = (a[:, ::-1] for a in (image, mask, weights))
            image = image * np.float32(np.random.uniform(0.8, 1.2))
        return (torch.from_numpy(np.ascontiguousarray(image))[None],
                torch.from_numpy(np.ascontiguousarray(mask)),
                torch.from_numpy(np.ascontiguousarray(weights)))


def double_conv(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, widths=(8, 16, 32)):
        super().__init__()
        self.down = nn.ModuleList()
        c = 1
        for w in widths:
            self.down.append(double_conv(c, w))
            c = w
        self.up, self.merge = nn.ModuleList(), nn.ModuleList()
        for w in reversed(widths[:-1]):
            self.up.append(nn.ConvTranspose2d(c, w, 2, stride=2))
            self.merge.append(double_conv(2 * w, w))
            c = w
        self.head = nn.Conv2d(c, 2, 1)

    def forward(self, x):
        skips = []
        for i, block in enumerate(self.down):
            if i:
                x = F.max_pool2d(x, 2)
            x = block(x)
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


def dice(pred, mask):
    inter = (pred & mask).sum().item()
    return 2 * inter / max(1, (pred.sum() + mask.sum()).item())


def main():
    rng = np.random.default_rng(0)
    np.random.seed(0)
    torch.manual_seed(0)
    images, labels = zip(*[draw_cells(rng, SIZE) for _ in range(N_IMAGES)])
    split = int(0.9 * N_IMAGES)
    train = DataLoader(CellDataset(images[:split], labels[:split], augment=True), BATCH, shuffle=True)
    valid = DataLoader(CellDataset(images[split:], labels[split:]), BATCH)
    net = UNet().to(memory_format=torch.channels_last)
    opt = torch.optim.Adam(net.parameters(), 1e-3, fused=True)

    for epoch in range(EPOCHS):
        net.train()
        losses = []
        for image, mask, weights in train:
            logits = net(image.contiguous(memory_format=torch.channels_last))
            loss = (F.cross_entropy(logits, mask, reduction="none") * weights).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        if epoch % 5 == 4:
            net.eval()
            with torch.no_grad():
                scores = [dice(net(im).argmax(1).bool(), m.bool()) for im, m, _ in valid]
            print(f"epoch {epoch}: loss {np.mean(losses):.4f} dice {np.mean(scores):.3f}", flush=True)
        else:
            print(f"epoch {epoch}: loss {np.mean(losses):.4f}", flush=True)


if __name__ == "__main__":
    main()
