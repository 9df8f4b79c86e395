"""Toy translation with a task / criterion / registry layout and max-token batches."""
import argparse
import logging
import math
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

logging.basicConfig(format="%(asctime)s | %(levelname)s | %(name)s | %(message)s", datefmt="%H:%M:%S",
                    level=logging.INFO, stream=sys.stdout)
logger = logging.getLogger("train")

REGISTRY = {"task": {}, "criterion": {}, "lr_scheduler": {}}


def register(kind, name):
    def wrap(cls):
        REGISTRY[kind][name] = cls
        return cls
    return wrap


class LanguagePairDataset:
    """Token id sequences, batched by length under a token budget; batches are collated once."""

    def __init__(self, src, tgt, pad, bos):
        self.src, self.tgt, self.pad, self.bos = src, tgt, pad, bos
        self.sizes = np.array([max(len(s), len(t)) for s, t in zip(src, tgt)])

    def batches(self, max_tokens, max_sentences):
        order = np.argsort(self.sizes, kind="stable")
        out, current = [], []
        for i in order:
            widest = self.sizes[i]
            if current and (len(current) + 1) * widest > max_tokens or len(current) == max_sentences:
                out.append(self.collate(current))
                current = []
            current.append(i)
        if current:
            out.append(self.collate(current))
        return out

    def collate(self, ids):
        def stack(rows, lead=()):
            width = max(len(r) for r in rows) + len(lead)
            block = np.full((len(rows), width), self.pad, np.int64)
            for k, r in enumerate(rows):
                block[k, : len(lead) + len(r)] = [*lead, *r]
            return torch.from_numpy(block)
        target = stack([self.tgt[i] for i in ids])
        prev = torch.cat([target.new_full((len(ids), 1), self.bos), target[:, :-1]], 1)
        return {"src": stack([self.src[i] for i in ids]), "prev": prev, "target": target,
                "ntokens": int((target != self.pad).sum())}


@register("task", "lexical_translation")
class TranslationTask:
    PAD, BOS, EOS, OFFSET = 0, 1, 2, 3

    def __init__(self, args):
        self.args, self.vocab = args, args.vocab + self.OFFSET

    def load_dataset(self, n, seed):
        rng = np.random.default_rng(seed)
        mapping = np.random.default_rng(99).permutation(self.args.vocab)
        src, tgt = [], []
        for length in rng.integers(6, 28, n):
            words = rng.zipf(1.3, length) % self.args.vocab
            out = mapping[words]
            out[: length // 2] = out[: length // 2][::-1]
            src.append(np.append(words + self.OFFSET, self.EOS))
            tgt.append(np.append(out + self.OFFSET, self.EOS))
        return LanguagePairDataset(src, tgt, self.PAD, self.BOS)

    def build_model(self):
        return TransformerModel(self.vocab, self.args, self.PAD)

    def train_step(self, sample, model, criterion, optimizer):
        loss, log = criterion(model, sample)
        optimizer.zero_grad(set_to_none=True)
        (loss / sample["ntokens"]).backward()
        log["gnorm"] = nn.utils.clip_grad_norm_(model.parameters(), self.args.clip_norm, foreach=True).item()
        optimizer.step()
        return log


class TransformerModel(nn.Module):
    def __init__(self, vocab, args, pad, max_positions=64):
        super().__init__()
        d = args.embed_dim
        self.pad, self.scale = pad, math.sqrt(d)
        self.embed = nn.Embedding(vocab, d, padding_idx=pad)
        nn.init.normal_(self.embed.weight, std=d ** -0.5)
        pos = torch.arange(max_positions)[:, None] * torch.exp(torch.arange(0, d, 2) * (-math.log(1e4) / d))
        self.register_buffer("positions", torch.stack([pos.sin(), pos.cos()], -1).flatten(1))
        self.register_buffer("future", torch.ones(max_positions, max_positions, dtype=torch.bool).triu(1))
        self.core = nn.Transformer(d, args.heads, args.layers, args.layers, 4 * d, dropout=args.dropout,
                                   batch_first=True, norm_first=True)
        self.out = nn.Linear(d, vocab, bias=False)
        self.out.weight = self.embed.weight

    def embed_tokens(self, ids):
        return self.embed(ids) * self.scale + self.positions[: ids.size(1)]

    def forward(self, src, prev):
        t, src_pad = prev.size(1), src == self.pad
        h = self.core(self.embed_tokens(src), self.embed_tokens(prev), tgt_mask=self.future[:t, :t],
                      src_key_padding_mask=src_pad, memory_key_padding_mask=src_pad, tgt_is_causal=True)
        return self.out(h)


@register("criterion", "label_smoothed_cross_entropy")
class LabelSmoothedCE:
    def __init__(self, args, pad):
        self.eps, self.pad = args.label_smoothing, pad

    def __call__(self, model, sample):
        logits = model(sample["src"], sample["prev"])
        loss = F.cross_entropy(logits.flatten(0, 1), sample["target"].flatten(), ignore_index=self.pad,
                               label_smoothing=self.eps, reduction="sum")
        return loss, {"loss": loss.item() / sample["ntokens"], "ntokens": sample["ntokens"]}


@register("lr_scheduler", "inverse_sqrt")
class InverseSqrt:
    def __init__(self, optimizer, lr, warmup):
        self.opt, self.lr, self.warmup = optimizer, lr, warmup

    def step_update(self, n):
        lr = self.lr * min((n + 1) / self.warmup, (self.warmup / (n + 1)) ** 0.5)
        for g in self.opt.param_groups:
            g["lr"] = lr
        return lr


def get_parser():
    p = argparse.ArgumentParser()
    p.add_argument("--task", default="lexical_translation")
    p.add_argument("--criterion", default="label_smoothed_cross_entropy")
    p.add_argument("--lr-scheduler", default="inverse_sqrt")
    p.add_argument("--vocab", type=int, default=400)
    p.add_argument("--embed-dim", type=int, default=128)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--dropout", type=float, default=0.0)
    p.add_argument("--label-smoothing", type=float, default=0.1)
    p.add_argument("--clip-norm", type=float, default=1.0)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--warmup-updates", type=int, default=200)
    p.add_argument("--max-tokens", type=int, default=1200)
    p.add_argument("--max-sentences", type=int, default=128)
    p.add_argument("--max-update", type=int, default=1500)
    p.add_argument("--log-interval", type=int, default=50)
    return p


def cli_main():
    args = get_parser().parse_args()
    torch.manual_seed(1)
    task = REGISTRY["task"][args.task](args)
    model = task.build_model()
    criterion = REGISTRY["criterion"][args.criterion](args, task.PAD)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98), fused=True)
    scheduler = REGISTRY["lr_scheduler"][args.lr_scheduler](optimizer, args.lr, args.warmup_updates)
    batches = task.load_dataset(5000, seed=0).batches(args.max_tokens, args.max_sentences)
    logger.info("num. model params: %d, %d batches per epoch", sum(p.numel() for p in model.parameters()), len(batches))

    updates, epoch, nll, tokens = 0, 0, 0.0, 0
    shuffle = np.random.default_rng(0)
    model.train()
    while updates < args.max_update:
        epoch += 1
        for k in shuffle.permutation(len(batches)):
            lr = scheduler.step_update(updates)
            log = task.train_step(batches[k], model, criterion, optimizer)
            updates += 1
            nll, tokens = nll + log["loss"] * log["ntokens"], tokens + log["ntokens"]
            if updates % args.log_interval == 0:
                logger.info("epoch %03d | loss %.3f | gnorm %.2f | lr %.2e | num_updates %d",
                            epoch, nll / tokens, log["gnorm"], lr, updates)
                nll, tokens = 0.0, 0
            if updates >= args.max_update:
                break


if __name__ == "__main__":
    cli_main()
