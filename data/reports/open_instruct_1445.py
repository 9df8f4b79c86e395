"""Direct preference optimisation of a small language model."""

import argparse
import copy
import logging
import time
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(level=logging.INFO, format="%(asctime)s - %(levelname)s - %(name)s - %(message)s")
logger = logging.getLogger("dpo")

VOCAB = 1024
PAD = 0


@dataclass
class FlatArguments:
    exp_name: str = "dpo_tiny"
    max_seq_length: int = 384
    per_device_train_batch_size: int = 4
    max_train_steps: int = 800
    learning_rate: float = 5e-5
    dpo_beta: float = 0.1
    num_pairs: int = 600
    hidden_size: int = 96
    num_layers: int = 2
    logging_steps: int = 10
    seed: int = 123


class PreferenceDataset(Dataset):
    def __init__(self, num_pairs, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = (20 + 340 * torch.rand(num_pairs, generator=generator) ** 6).long()
        self.pairs = []
        for length in lengths.tolist():
            prompt = torch.randint(1, VOCAB, (length // 2,), generator=generator)
            answers = [torch.randint(1, VOCAB, (max(4, length // 2 - cut),), generator=generator) for cut in (0, length // 8)]
            self.pairs.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        pair = self.pairs[index]
        item = {}
        for name in ("chosen", "rejected"):
            item[f"{name}_input_ids"] = torch.cat([pair["prompt"], pair[name]])
            item[f"{name}_labels"] = torch.cat([torch.full_like(pair["prompt"], -100), pair[name]])
        return item


class DataCollatorForPreference:
    def __init__(self, max_seq_length):
        self.max_seq_length = max_seq_length

    def __call__(self, features):
        batch = {}
        for name in features[0]:
            value = -100 if name.endswith("labels") else PAD
            rows = [f[name][: self.max_seq_length] for f in features]
            target_len = self.max_seq_length
            batch[name] = torch.stack([F.pad(r, (0, target_len - len(r)), value=value) for r in rows])
        return batch


class Layer(nn.Module):
    def __init__(self, hidden_size, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden_size), nn.RMSNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.up = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.down = nn.Linear(4 * hidden_size, hidden_size, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class CausalLM(nn.Module):
    def __init__(self, hidden_size, num_layers):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden_size)
        self.layers = nn.ModuleList(Layer(hidden_size) for _ in range(num_layers))
        self.norm = nn.RMSNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, VOCAB, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))

    def flops_per_token(self):
        return 6 * sum(p.numel() for p in self.parameters())


def get_batch_logps(logits, labels):
    labels = labels[:, 1:].clone()
    mask = labels != -100
    labels[~mask] = 0
    logps = torch.gather(logits[:, :-1].log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (logps * mask).sum(-1)


def concatenated_forward(model, batch):
    width = max(batch["chosen_input_ids"].shape[1], batch["rejected_input_ids"].shape[1])
    ids = torch.cat([F.pad(batch[f"{n}_input_ids"], (0, width - batch[f"{n}_input_ids"].shape[1]), value=PAD) for n in ("chosen", "rejected")])
    labels = torch.cat([F.pad(batch[f"{n}_labels"], (0, width - batch[f"{n}_labels"].shape[1]), value=-100) for n in ("chosen", "rejected")])
    logps = get_batch_logps(model(ids), labels)
    return logps.chunk(2)


def dpo_loss(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta):
    logits = (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected)
    return -F.logsigmoid(beta * logits).mean()


def main(args):
    torch.manual_seed(args.seed)
    dataset = PreferenceDataset(args.num_pairs, args.seed)
    collator = DataCollatorForPreference(args.max_seq_length)
    dataloader = DataLoader(dataset, args.per_device_train_batch_size, shuffle=True, collate_fn=collator, drop_last=True)
    model = CausalLM(args.hidden_size, args.num_layers)
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.max_train_steps)

    step, tokens, start = 0, 0, time.perf_counter()
    while step < args.max_train_steps:
        for batch in dataloader:
            with torch.no_grad():
                reference_logps = concatenated_forward(reference, batch)
            policy_logps = concatenated_forward(model, batch)
            loss = dpo_loss(*policy_logps, *reference_logps, args.dpo_beta)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            tokens += batch["chosen_input_ids"].numel() + batch["rejected_input_ids"].numel()
            if step % args.logging_steps == 0:
                elapsed = time.perf_counter() - start
                mfu = 100 * model.flops_per_token() * tokens / elapsed / 200e9
                logger.info("Step: %d, Loss: %.4f, TPS: %.0f, MFU: %.2f%%", step, loss.item(), tokens / elapsed, mfu)
            if step >= args.max_train_steps:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for f in fields(FlatArguments):
        parser.add_argument(f"--{f.name}", type=type(f.default), default=f.default)
    main(FlatArguments(**vars(parser.parse_args())))
