"""Anchor-free detector for simple shapes; config dict, hook-based trainer, event storage."""
import logging
import time
import weakref
from collections import defaultdict

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

logging.basicConfig(format="[%(asctime)s %(name)s]: %(message)s", datefmt="%m/%d %H:%M:%S", level=logging.INFO)
logger = logging.getLogger("d2lite")

CFG = {
    "INPUT": {"SIZE": 96, "STRIDE": 4, "NUM_IMAGES": 900},
    "MODEL": {"WIDTHS": (16, 32, 64), "CLASSES": 3, "WH_WEIGHT": 0.1},
    "SOLVER": {"IMS_PER_BATCH": 18, "BASE_LR": 1e-3, "MAX_ITER": 2500, "STEPS": (1500, 2200), "WARMUP": 100},
    "TEST": {"EVAL_PERIOD": 400},
}


def make_scene(rng, size):
    img = rng.normal(0.45, 0.06, (3, size, size)).astype(np.float32)
    boxes, classes = [], []
    yy, xx = np.mgrid[:size, :size]
    for _ in range(rng.integers(1, 5)):
        w, h = rng.uniform(12, 32, 2)
        cx, cy = rng.uniform(w / 2, size - w / 2), rng.uniform(h / 2, size - h / 2)
        k = int(rng.integers(3))
        dx, dy = np.abs(xx - cx) / (w / 2), np.abs(yy - cy) / (h / 2)
        inside = (np.maximum(dx, dy), dx ** 2 + dy ** 2, dx + dy)[k] < 1
        img[:, inside] = rng.uniform(0, 1, 3)[:, None] + 0.04 * rng.standard_normal((3, int(inside.sum())))
        boxes.append((cx, cy, w, h))
        classes.append(k)
    return img, np.array(boxes), np.array(classes)


def encode_targets(boxes, classes, size, stride, num_classes):
    """Gaussian heat map, size map and validity map for one image (done once at load time)."""
    n = size // stride
    grid = np.arange(n)
    heat, wh = np.zeros((num_classes, n, n), np.float32), np.zeros((2, n, n), np.float32)
    valid = np.zeros((1, n, n), np.float32)
    for (cx, cy, w, h), k in zip(boxes / stride, classes):
        ix, iy = min(int(cx), n - 1), min(int(cy), n - 1)
        g = np.exp(-((grid[:, None] - iy) ** 2 / (h / 3) ** 2 + (grid[None] - ix) ** 2 / (w / 3) ** 2))
        heat[k] = np.maximum(heat[k], g)
        wh[:, iy, ix], valid[0, iy, ix] = (w, h), 1
    return heat, wh, valid


def build_dataset(cfg, n, seed):
    rng, c = np.random.default_rng(seed), cfg["INPUT"]
    scenes = [make_scene(rng, c["SIZE"]) for _ in range(n)]
    targets = [encode_targets(b, k, c["SIZE"], c["STRIDE"], cfg["MODEL"]["CLASSES"]) for _, b, k in scenes]
    fields = [np.stack([s[0] for s in scenes])] + [np.stack(t) for t in zip(*targets)]
    return [torch.from_numpy(f) for f in fields]


def training_batches(tensors, batch_size):
    while True:
        for idx in torch.randperm(len(tensors[0])).split(batch_size):
            image, heat, wh, valid = (t[idx] for t in tensors)
            if torch.rand(()) < 0.5:
                image, heat, wh, valid = (t.flip(3) for t in (image, heat, wh, valid))
            yield image.contiguous(memory_format=torch.channels_last), heat, wh, valid


def conv_bn(cin, cout, stride=1):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class CenterNetLite(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        a, b, c = cfg["MODEL"]["WIDTHS"]
        self.wh_weight = cfg["MODEL"]["WH_WEIGHT"]
        self.res2 = nn.Sequential(conv_bn(3, a, 2), conv_bn(a, b, 2), conv_bn(b, b))
        self.res3 = nn.Sequential(conv_bn(b, c, 2), conv_bn(c, c), conv_bn(c, c))
        self.lateral, self.top = nn.Conv2d(b, c, 1), nn.Conv2d(c, c, 1)
        self.fuse = conv_bn(c, c)
        self.heat, self.wh = nn.Conv2d(c, cfg["MODEL"]["CLASSES"], 1), nn.Conv2d(c, 2, 1)
        nn.init.constant_(self.heat.bias, -2.2)

    def forward(self, x):
        c2 = self.res2(x)
        p = self.lateral(c2) + F.interpolate(self.top(self.res3(c2)), scale_factor=2, mode="nearest")
        p = self.fuse(p)
        return self.heat(p), self.wh(p)

    def losses(self, image, heat, wh, valid):
        logit, size = self(image)
        p = logit.sigmoid().clamp(1e-4, 1 - 1e-4)
        peak = (heat == 1).float()
        num = valid.sum().clamp_min(1)
        focal = -(peak * (1 - p) ** 2 * p.log() + (1 - peak) * (1 - heat) ** 4 * p ** 2 * (1 - p).log())
        return {"loss_heat": focal.sum() / num, "loss_wh": self.wh_weight * ((size - wh).abs() * valid).sum() / num}


class EventStorage:
    def __init__(self):
        self.hist = defaultdict(list)

    def put(self, **scalars):
        for k, v in scalars.items():
            self.hist[k].append(v)

    def recent(self, key, n=20):
        return float(np.median(self.hist[key][-n:]))


class HookBase:
    trainer = None
    def before_train(self): ...
    def after_step(self): ...


class LRScheduler(HookBase):
    def after_step(self):
        s, t = self.trainer.cfg["SOLVER"], self.trainer
        lr = s["BASE_LR"] * min(1, (t.iter + 1) / s["WARMUP"]) * 0.1 ** sum(t.iter >= k for k in s["STEPS"])
        for g in t.optimizer.param_groups:
            g["lr"] = lr


class PeriodicWriter(HookBase):
    def after_step(self):
        t = self.trainer
        if t.iter % 20 == 19:
            losses = "  ".join(f"{k}: {t.storage.recent(k):.4f}" for k in ("total_loss", "loss_heat", "loss_wh"))
            logger.info(f"iter: {t.iter + 1}  {losses}  time: {t.storage.recent('time'):.4f}  "
                        f"data_time: {t.storage.recent('data_time'):.4f}")


class EvalHook(HookBase):
    def __init__(self, period, tensors):
        self.period, self.tensors = period, tensors

    @torch.no_grad()
    def after_step(self):
        t = self.trainer
        if (t.iter + 1) % self.period == 0:
            image, heat, _, valid = self.tensors
            t.model.eval()
            logit, _ = t.model(image.contiguous(memory_format=torch.channels_last))
            t.model.train()
            peaks = logit.amax(1, keepdim=True)
            peaks = (peaks == F.max_pool2d(peaks, 3, 1, 1)) & (peaks > 0)
            near = F.max_pool2d(peaks.float(), 3, 1, 1)
            logger.info(f"recall@0.5 {((near * valid).sum() / valid.sum()).item():.3f}")


class SimpleTrainer:
    def __init__(self, cfg, model, loader, optimizer):
        self.cfg, self.model, self.loader, self.optimizer = cfg, model, iter(loader), optimizer
        self.storage, self.hooks = EventStorage(), []

    def register_hooks(self, hooks):
        for h in hooks:
            h.trainer = weakref.proxy(self)
        self.hooks.extend(hooks)

    def run_step(self):
        start = time.perf_counter()
        batch = next(self.loader)
        data_time = time.perf_counter() - start
        loss_dict = self.model.losses(*batch)
        losses = sum(loss_dict.values())
        self.optimizer.zero_grad()
        losses.backward()
        self.optimizer.step()
        self.storage.put(total_loss=losses.item(), data_time=data_time, time=time.perf_counter() - start,
                         **{k: v.item() for k, v in loss_dict.items()})

    def train(self, max_iter):
        self.model.train()
        for h in self.hooks:
            h.before_train()
        for self.iter in range(max_iter):
            self.run_step()
            for h in self.hooks:
                h.after_step()


if __name__ == "__main__":
    torch.manual_seed(2)
    model = CenterNetLite(CFG).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), CFG["SOLVER"]["BASE_LR"], fused=True)
    data = build_dataset(CFG, CFG["INPUT"]["NUM_IMAGES"], seed=0)
    trainer = SimpleTrainer(CFG, model, training_batches(data, CFG["SOLVER"]["IMS_PER_BATCH"]), optimizer)
    trainer.register_hooks([LRScheduler(), PeriodicWriter(),
                            EvalHook(CFG["TEST"]["EVAL_PERIOD"], build_dataset(CFG, 48, seed=1))])
    trainer.train(CFG["SOLVER"]["MAX_ITER"])
