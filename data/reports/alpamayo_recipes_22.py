"""Supervised fine-tuning of a small driving policy on recorded clips (features in a zip archive)."""

import argparse
import io
import logging
import os
import random
import tempfile
import time
import zipfile
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(level=logging.INFO, format="[%(asctime)s][%(name)s] %(message)s")
logger = logging.getLogger("alpamayo.sft")

N_CLIPS = 3000
N_CAM_TOKENS = 16
CAM_DIM = 96
N_WAYPOINTS = 16
ROAD_WORDS = "lane keep left right merge yield stop go slow fast curve exit ramp light red green car truck bike".split()


def write_features(root: str, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    path = os.path.join(root, "features.zip")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(N_CLIPS):
            buffer = io.BytesIO()
            np.savez(
                buffer,
                camera=rng.standard_normal((N_CAM_TOKENS, CAM_DIM)).astype(np.float16),
                ego_history=rng.standard_normal((32, 4)).astype(np.float32),
                waypoints=np.cumsum(rng.standard_normal((N_WAYPOINTS, 2)).astype(np.float32), axis=0),
            )
            archive.writestr(f"clips/{i:06d}.npz", buffer.getvalue())
    return path


class Processor:
    """Maps prompt words and trajectory bins to ids."""

    def __init__(self, vocab_size: int = 50_000, n_bins: int = 512):
        self.vocab = {f"<w{i}>": i for i in range(vocab_size - n_bins - len(ROAD_WORDS))}
        for word in ROAD_WORDS:
            self.vocab[word] = len(self.vocab)
        for b in range(n_bins):
            self.vocab[f"<traj_{b}>"] = len(self.vocab)
        self.n_bins = n_bins

    def __call__(self, prompts, histories):
        ids = []
        for prompt, history in zip(prompts, histories):
            row = [self.vocab[w] for w in prompt]
            bins = np.clip((history[:, 0] * 64 + self.n_bins / 2).astype(int), 0, self.n_bins - 1)
            row += [self.vocab[f"<traj_{b}>"] for b in bins]
            ids.append(row)
        width = max(len(r) for r in ids)
        return torch.tensor([r + [0] * (width - len(r)) for r in ids])


class ClipDataset(Dataset):
    def __init__(self, archive_path: str, seed: int = 0):
        self.archive_path = archive_path
        self.seed = seed

    def __len__(self):
        return N_CLIPS

    def _build_prompt(self, index):
        rng = random.Random(self.seed * 100_003 + index)
        return [rng.choice(ROAD_WORDS) for _ in range(rng.randint(12, 24))]

    def __getitem__(self, index):
        with zipfile.ZipFile(self.archive_path) as archive:
            clip = np.load(io.BytesIO(archive.read(f"clips/{index:06d}.npz")))
            return {
                "camera": torch.from_numpy(clip["camera"].astype(np.float32)),
                "history": clip["ego_history"],
                "waypoints": torch.from_numpy(clip["waypoints"]),
                "prompt": self._build_prompt(index),
            }


def collate_fn(samples):
    processor = Processor()
    input_ids = processor([s["prompt"] for s in samples], [s["history"] for s in samples])
    return {
        "input_ids": input_ids,
        "camera": torch.stack([s["camera"] for s in samples]),
        "waypoints": torch.stack([s["waypoints"] for s in samples]),
    }


class DrivingPolicy(nn.Module):
    def __init__(self, vocab_size=50_000, width=CAM_DIM, layers=4, heads=4):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width, sparse=False)
        self.embed.weight.requires_grad_(False)
        self.camera_proj = nn.Linear(CAM_DIM, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.backbone = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.action_head = nn.Linear(width, N_WAYPOINTS * 2)

    def forward(self, input_ids, camera, waypoints):
        x = torch.cat([self.embed(input_ids), self.camera_proj(camera)], dim=1)
        hidden = self.backbone(x).mean(dim=1)
        pred = self.action_head(hidden).view(-1, N_WAYPOINTS, 2)
        return F.smooth_l1_loss(pred.float(), waypoints)


@dataclass
class TrainingArguments:
    max_steps: int = 1200
    per_device_train_batch_size: int = 8
    dataloader_num_workers: int = 0
    learning_rate: float = 2e-4
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    logging_steps: int = 20
    bf16: bool = True
    tf32: bool = False
    seed: int = 42


@dataclass
class TrainerState:
    global_step: int = 0
    epoch: int = 0
    log_history: list = field(default_factory=list)


class TrainerCallback:
    def on_train_begin(self, args, state, **kwargs): ...
    def on_step_end(self, args, state, **kwargs): ...
    def on_train_end(self, args, state, **kwargs): ...


class StepTimeCallback(TrainerCallback):
    def on_train_begin(self, args, state, **kwargs):
        self.last = time.perf_counter()

    def on_step_end(self, args, state, loss=None, **kwargs):
        if state.global_step % args.logging_steps == 0:
            now = time.perf_counter()
            per_step = (now - self.last) / args.logging_steps
            self.last = now
            logger.info("step %d loss %.4f step_time %.3f s", state.global_step, loss.item(), per_step)


class Trainer:
    def __init__(self, model, args, train_dataset, data_collator, callbacks=()):
        self.model, self.args = model, args
        self.train_dataset, self.data_collator = train_dataset, data_collator
        self.callbacks = list(callbacks)
        self.state = TrainerState()

    def get_train_dataloader(self):
        return DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            shuffle=True,
            drop_last=True,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
        )

    def create_optimizer(self):
        params = [p for p in self.model.parameters() if p.requires_grad]
        return torch.optim.AdamW(params, lr=self.args.learning_rate, weight_decay=self.args.weight_decay)

    def _call(self, event, **kwargs):
        for callback in self.callbacks:
            getattr(callback, event)(self.args, self.state, **kwargs)

    def training_step(self, inputs):
        self.model.train()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.args.bf16):
            loss = self.model(**inputs)
        loss.backward()
        return loss.detach()

    def train(self):
        loader = self.get_train_dataloader()
        optimizer = self.create_optimizer()
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, self.args.max_steps)
        self._call("on_train_begin")
        while self.state.global_step < self.args.max_steps:
            for inputs in loader:
                loss = self.training_step(inputs)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
                self.state.global_step += 1
                self._call("on_step_end", loss=loss)
                if self.state.global_step >= self.args.max_steps:
                    break
            self.state.epoch += 1
        self._call("on_train_end")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=TrainingArguments.max_steps)
    parser.add_argument("--tf32", action="store_true")
    cli = parser.parse_args()
    args = TrainingArguments(max_steps=cli.max_steps, tf32=cli.tf32)
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    with tempfile.TemporaryDirectory() as root:
        dataset = ClipDataset(write_features(root))
        trainer = Trainer(DrivingPolicy(), args, dataset, collate_fn, callbacks=[StepTimeCallback()])
        trainer.train()
    logger.info("done: %d steps, %d epochs", trainer.state.global_step, trainer.state.epoch)


if __name__ == "__main__":
    main()
