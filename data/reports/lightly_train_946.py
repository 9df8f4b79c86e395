"""Fine-tune a small anchor-free detector; mean average precision after every epoch."""

import argparse
import time
from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

NUM_CLASSES = 8
IMAGE_SIZE = 96
STRIDE = 8


class SyntheticDetection(Dataset):
    def __init__(self, length, seed):
        rng = np.random.default_rng(seed)
        self.images = torch.zeros(length, 3, IMAGE_SIZE, IMAGE_SIZE)
        self.targets = []
        colours = np.random.default_rng(0).random((NUM_CLASSES, 3)).astype(np.float32)
        for i in range(length):
            count = int(rng.integers(20, 40))
            centers = rng.uniform(16, IMAGE_SIZE - 16, (count, 2))
            sizes = rng.uniform(8, 28, (count, 2))
            boxes = np.concatenate([centers - sizes / 2, centers + sizes / 2], axis=1).clip(0, IMAGE_SIZE).astype(np.float32)
            labels = rng.integers(0, NUM_CLASSES, count)
            for (x0, y0, x1, y1), label in zip(boxes.astype(int), labels):
                self.images[i, :, y0:y1, x0:x1] = torch.from_numpy(colours[label])[:, None, None]
            self.targets.append({"boxes": torch.from_numpy(boxes), "labels": torch.from_numpy(labels)})
        self.images += 0.05 * torch.randn_like(self.images)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


def collate(batch):
    images, targets = zip(*batch)
    return torch.stack(images), list(targets)


def box_iou(box, others):
    x0 = max(box[0], others[0])
    y0 = max(box[1], others[1])
    x1 = min(box[2], others[2])
    y1 = min(box[3], others[3])
    inter = max(0.0, x1 - x0) * max(0.0, y1 - y0)
    area_a = (box[2] - box[0]) * (box[3] - box[1])
    area_b = (others[2] - others[0]) * (others[3] - others[1])
    return inter / (area_a + area_b - inter + 1e-9)


class MeanAveragePrecision:
    def __init__(self, iou_thresholds=None):
        self.iou_thresholds = iou_thresholds or [0.5 + 0.05 * i for i in range(10)]
        self.reset()

    def reset(self):
        self.predictions, self.targets = [], []

    def update(self, predictions, targets):
        for prediction, target in zip(predictions, targets):
            self.predictions.append({k: v.tolist() for k, v in prediction.items()})
            self.targets.append({k: v.tolist() for k, v in target.items()})

    def _match(self, prediction, target, label, threshold):
        boxes = [b for b, l in zip(target["boxes"], target["labels"]) if l == label]
        used = [False] * len(boxes)
        hits = []
        order = sorted(range(len(prediction["scores"])), key=lambda i: -prediction["scores"][i])
        for i in order:
            if prediction["labels"][i] != label:
                continue
            best, best_iou = -1, threshold
            for j, box in enumerate(boxes):
                iou = box_iou(prediction["boxes"][i], box)
                if not used[j] and iou >= best_iou:
                    best, best_iou = j, iou
            if best >= 0:
                used[best] = True
            hits.append((prediction["scores"][i], best >= 0))
        return hits, len(boxes)

    def compute(self):
        scores = defaultdict(list)
        for threshold in self.iou_thresholds:
            for label in range(NUM_CLASSES):
                hits, positives = [], 0
                for prediction, target in zip(self.predictions, self.targets):
                    h, n = self._match(prediction, target, label, threshold)
                    hits += h
                    positives += n
                if positives == 0:
                    continue
                hits.sort(key=lambda h: -h[0])
                tp = np.cumsum([h[1] for h in hits]) if hits else np.zeros(1)
                precision = tp / np.arange(1, len(tp) + 1)
                recall = tp / positives
                ap = np.mean([precision[recall >= r].max(initial=0.0) for r in np.linspace(0, 1, 101)])
                scores[round(threshold, 2)].append(ap)
        per_threshold = {t: float(np.mean(v)) for t, v in scores.items()}
        return {"map": float(np.mean(list(per_threshold.values()))), "map_50": per_threshold.get(0.5, 0.0)}


def conv_block(c_in, c_out, stride=1):
    return nn.Sequential(nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out), nn.SiLU())


class Detector(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.backbone = nn.Sequential(
            conv_block(3, width, 2), conv_block(width, 2 * width, 2), conv_block(2 * width, 2 * width),
            conv_block(2 * width, 3 * width, 2), conv_block(3 * width, 3 * width), conv_block(3 * width, 3 * width),
        )
        self.cls_head = nn.Conv2d(3 * width, NUM_CLASSES, 1)
        self.box_head = nn.Conv2d(3 * width, 4, 1)

    def forward(self, images):
        features = self.backbone(images)
        return self.cls_head(features), F.softplus(self.box_head(features))


class DetectionTask:
    def __init__(self, model, lr=2e-3, topk=100):
        self.model, self.lr, self.topk = model, lr, topk
        self.val_metric = MeanAveragePrecision()
        grid = (torch.arange(IMAGE_SIZE // STRIDE) + 0.5) * STRIDE
        ys, xs = torch.meshgrid(grid, grid, indexing="ij")
        self.points = torch.stack([xs, ys], dim=-1).view(-1, 2)

    def assign(self, target):
        boxes, labels = target["boxes"], target["labels"]
        deltas = torch.cat([self.points[:, None] - boxes[None, :, :2], boxes[None, :, 2:] - self.points[:, None]], dim=-1)
        area = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).expand(len(self.points), -1)
        area = area.masked_fill(deltas.amin(dim=-1) <= 0, float("inf"))
        best_area, best = area.min(dim=1)
        positive = best_area.isfinite()
        return positive, labels[best], deltas[torch.arange(len(best)), best]

    def training_step(self, batch):
        images, targets = batch
        cls, box = self.model(images)
        cls, box = cls.flatten(2).transpose(1, 2), box.flatten(2).transpose(1, 2)
        assigned = [self.assign(t) for t in targets]
        positive = torch.stack([a[0] for a in assigned])
        labels = torch.stack([a[1] for a in assigned])
        deltas = torch.stack([a[2] for a in assigned])
        one_hot = F.one_hot(labels, NUM_CLASSES).float() * positive[..., None]
        loss_cls = F.binary_cross_entropy_with_logits(cls, one_hot)
        loss_box = F.smooth_l1_loss(box[positive], deltas[positive] / STRIDE)
        return 5 * loss_cls + loss_box

    @torch.no_grad()
    def validation_step(self, batch):
        images, targets = batch
        cls, box = self.model(images)
        scores, labels = cls.flatten(2).sigmoid().max(dim=1)
        box = box.flatten(2).transpose(1, 2) * STRIDE
        boxes = torch.cat([self.points - box[..., :2], self.points + box[..., 2:]], dim=-1)
        top = scores.topk(self.topk, dim=1)
        predictions = [
            {"boxes": boxes[i, top.indices[i]], "scores": top.values[i], "labels": labels[i, top.indices[i]]}
            for i in range(len(images))
        ]
        self.val_metric.update(predictions, targets)

    def on_validation_epoch_end(self):
        result = self.val_metric.compute()
        self.val_metric.reset()
        return result

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=self.lr, weight_decay=1e-4)


def fit(task, train_loader, val_loader, epochs):
    optimizer = task.configure_optimizers()
    for epoch in range(epochs):
        start = time.perf_counter()
        task.model.train()
        for step, batch in enumerate(train_loader):
            loss = task.training_step(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                print(f"Epoch {epoch} | Step {step}/{len(train_loader)} | train_loss {loss.item():.4f}")
        task.model.eval()
        for batch in val_loader:
            task.validation_step(batch)
        task.last_metrics = task.on_validation_epoch_end()
        print(f"Epoch {epoch} | took {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    train_loader = DataLoader(SyntheticDetection(40 * args.batch_size, 1), args.batch_size, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(SyntheticDetection(200, 2), args.batch_size, collate_fn=collate)
    task = DetectionTask(Detector())
    fit(task, train_loader, val_loader, args.epochs)
    print({k: round(v, 4) for k, v in task.last_metrics.items()})
