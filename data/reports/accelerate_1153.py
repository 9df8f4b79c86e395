"""Text classification over two processes with gradient accumulation."""

import argparse
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class ToyMRPC(Dataset):
    def __init__(self, length, seq_len=24, vocab_size=20000, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 2, (length,), generator=generator)
        low = torch.randint(0, vocab_size // 2, (length, seq_len), generator=generator)
        self.input_ids = low + self.labels[:, None] * torch.randint(0, vocab_size // 2, (length, seq_len), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    def __init__(self, vocab_size=20000, hidden_size=256, width=2048, num_labels=2):
        super().__init__()
        self.embeddings = nn.EmbeddingBag(vocab_size, hidden_size, mode="mean")
        self.encoder = nn.Sequential(
            nn.Linear(hidden_size, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )
        self.classifier = nn.Linear(width, num_labels)

    def forward(self, input_ids, labels):
        logits = self.classifier(self.encoder(self.embeddings(input_ids)))
        return nn.functional.cross_entropy(logits, labels), logits


def get_dataloader(args, rank, world_size):
    dataset = ToyMRPC(args.train_samples)
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=args.seed)
    return DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)


def training_function(rank, args, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(args.num_processes))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    train_dataloader = get_dataloader(args, rank, args.num_processes)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    begin = time.perf_counter()
    for epoch in range(args.num_epochs):
        model.train()
        train_dataloader.sampler.set_epoch(epoch)
        for step, batch in enumerate(train_dataloader):
            loss, _ = model(**batch)
            loss = loss / args.gradient_accumulation_steps
            loss.backward()
            if (step + 1) % args.gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                if rank == 0:
                    elapsed = time.perf_counter() - begin
                    print(f"epoch {epoch} step {step + 1}: loss {loss.item() * args.gradient_accumulation_steps:.4f} ({elapsed:.1f} s)", flush=True)
    if rank == 0:
        print(f"training took {time.perf_counter() - begin:.2f} s")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description="Simple example of a training script with gradient accumulation.")
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--num_epochs", type=int, default=10)
    parser.add_argument("--train_samples", type=int, default=2048)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(training_function, args=(args, port), nprocs=args.num_processes, join=True)


if __name__ == "__main__":
    main()
