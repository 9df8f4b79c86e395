"""Masked language model pre-training on a plain text corpus."""

import random
import time
import unicodedata
from collections import deque

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

PAD, CLS, SEP, MASK, UNK = 0, 1, 2, 3, 4

CFG = {
    "seed": 17,
    "max_duration": "2500ba",
    "max_seq_len": 256,
    "global_train_batch_size": 4,
    "mlm_probability": 0.3,
    "num_workers": 0,
    "corpus": {"num_documents": 3000, "num_words": 5000, "words": [300, 800]},
    "tokenizer": {"vocab_size": 3000, "max_piece": 12},
    "model": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
    "optimizer": {"lr": 5e-4, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 1e-5},
    "scheduler": {"t_warmup": 20},
    "console_log_interval": 10,
}


def make_corpus(num_documents, num_words, words, seed):
    rng = random.Random(seed)
    letters = "eeettaaooinnsshrrdlucmfwypvbgkqjxz"
    lexicon = ["".join(rng.choice(letters) for _ in range(rng.randint(2, 11))) for _ in range(num_words)]
    weights = [1 / (i + 2) for i in range(num_words)]
    documents = []
    for _ in range(num_documents):
        picked = rng.choices(lexicon, weights, k=rng.randint(*words))
        documents.append(" ".join(picked))
    return documents, lexicon


def is_control(char):
    return char not in "\t\n\r" and unicodedata.category(char).startswith("C")


def is_punctuation(char):
    code = ord(char)
    if 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126:
        return True
    return unicodedata.category(char).startswith("P")


def clean_text(text):
    return "".join(" " if char.isspace() else char for char in text if not is_control(char))


def strip_accents(text):
    return "".join(char for char in unicodedata.normalize("NFD", text) if unicodedata.category(char) != "Mn")


def split_on_punctuation(word):
    pieces, start_new = [], True
    for char in word:
        if is_punctuation(char):
            pieces.append(char)
            start_new = True
        elif start_new:
            pieces.append(char)
            start_new = False
        else:
            pieces[-1] += char
    return pieces


class WordPieceTokenizer:
    def __init__(self, lexicon, vocab_size, max_piece, seed=0):
        rng = random.Random(seed)
        pieces = {c for w in lexicon for c in w} | {"##" + c for w in lexicon for c in w}
        while len(pieces) < vocab_size - 5:
            word = rng.choice(lexicon)
            start = rng.randrange(len(word))
            stop = min(len(word), start + rng.randint(2, 4))
            pieces.add(("##" if start else "") + word[start:stop])
        self.vocab = {piece: i + 5 for i, piece in enumerate(sorted(pieces))}
        self.vocab_size = len(self.vocab) + 5
        self.max_piece = max_piece

    def encode_word(self, word):
        ids, start = [], 0
        while start < len(word):
            stop = min(len(word), start + self.max_piece)
            while stop > start:
                piece = ("##" if start else "") + word[start:stop]
                if piece in self.vocab:
                    ids.append(self.vocab[piece])
                    break
                stop -= 1
            else:
                return [UNK]
            start = stop
        return ids

    def __call__(self, text, max_length):
        ids = [CLS]
        for word in clean_text(text).split():
            for piece in split_on_punctuation(strip_accents(word.lower())):
                ids.extend(self.encode_word(piece))
        return ids[: max_length - 1] + [SEP]


class StreamingTextDataset(IterableDataset):
    def __init__(self, documents, tokenizer, max_seq_len, seed):
        self.documents, self.tokenizer = documents, tokenizer
        self.max_seq_len, self.seed = max_seq_len, seed

    def __iter__(self):
        order = random.Random(self.seed)
        while True:
            index = order.randrange(len(self.documents))
            yield self.tokenizer(self.documents[index], self.max_seq_len)


class SequencePacker:
    """Fills rows of `seq_len` by best fit from a buffer of sequences, then masks."""

    def __init__(self, source, batch_size, seq_len, mask_prob, vocab_size, buffer_size=64, seed=0):
        self.source, self.batch_size, self.seq_len = iter(source), batch_size, seq_len
        self.mask_prob, self.vocab_size, self.buffer_size = mask_prob, vocab_size, buffer_size
        self.buffer = deque()
        self.rng = np.random.default_rng(seed)

    def _fill(self):
        while len(self.buffer) < self.buffer_size:
            item = next(self.source)
            for i in range(0, len(item), 160):
                self.buffer.append(item[i : i + 160])

    def _best_fit(self, space):
        best = None
        for i, item in enumerate(self.buffer):
            if len(item) <= space and (best is None or len(item) > len(self.buffer[best])):
                best = i
        if best is None:
            return None
        item = self.buffer[best]
        del self.buffer[best]
        return item

    def __iter__(self):
        return self

    def __next__(self):
        rows = np.zeros((self.batch_size, self.seq_len), dtype=np.int64)
        for row in rows:
            used = 0
            while used < self.seq_len:
                self._fill()
                item = self._best_fit(self.seq_len - used)
                if item is None:
                    break
                row[used : used + len(item)] = item
                used += len(item)
        labels = rows.copy()
        chosen = (self.rng.random(rows.shape) < self.mask_prob) & (rows > UNK)
        labels[~chosen] = -100
        rows[chosen] = MASK
        return {"input_ids": torch.from_numpy(rows), "labels": torch.from_numpy(labels)}


class Block(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, intermediate_size, **_):
        super().__init__()
        self.heads = num_attention_heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.Wqkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.Wo = nn.Linear(hidden_size, hidden_size, bias=False)
        self.Wi = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.Wd = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.Wqkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c)
        x = x + self.Wo(a)
        u, g = self.Wi(self.norm2(x)).chunk(2, dim=-1)
        return x + self.Wd(u * F.gelu(g))


class FlexBertForMaskedLM(nn.Module):
    def __init__(self, vocab_size, max_seq_len, cfg):
        super().__init__()
        self.tok = nn.Embedding(vocab_size, cfg["hidden_size"])
        self.pos = nn.Embedding(max_seq_len, cfg["hidden_size"])
        self.layers = nn.ModuleList(Block(**cfg) for _ in range(cfg["num_hidden_layers"]))
        self.norm = nn.LayerNorm(cfg["hidden_size"])
        self.decoder = nn.Linear(cfg["hidden_size"], vocab_size)

    def forward(self, batch):
        ids, labels = batch["input_ids"], batch["labels"]
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        keep = labels != -100
        return F.cross_entropy(self.decoder(self.norm(x[keep])), labels[keep])


class SpeedMonitor:
    def __init__(self, interval):
        self.interval = interval
        self.start, self.tokens = time.perf_counter(), 0

    def batch_end(self, step, batch, loss):
        self.tokens += batch["input_ids"].numel()
        if step % self.interval == 0:
            now = time.perf_counter()
            rate = self.tokens / (now - self.start)
            print(f"[batch={step}/{CFG['max_duration']}] loss/train/total: {loss.item():.4f} throughput/tokens_per_sec: {rate:.0f}")
            self.start, self.tokens = now, 0


class Trainer:
    def __init__(self, model, train_dataloader, optimizer, scheduler, max_duration, callbacks):
        self.model, self.train_dataloader = model, train_dataloader
        self.optimizer, self.scheduler, self.callbacks = optimizer, scheduler, callbacks
        self.max_batches = int(max_duration.removesuffix("ba"))

    def fit(self):
        self.model.train()
        for step, batch in enumerate(self.train_dataloader, start=1):
            loss = self.model(batch)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            for callback in self.callbacks:
                callback.batch_end(step, batch, loss)
            if step >= self.max_batches:
                break


def build_dataloader(cfg, tokenizer, documents):
    dataset = StreamingTextDataset(documents, tokenizer, cfg["max_seq_len"], cfg["seed"])
    loader = DataLoader(dataset, batch_size=None, num_workers=cfg["num_workers"])
    return SequencePacker(loader, cfg["global_train_batch_size"], cfg["max_seq_len"], cfg["mlm_probability"], tokenizer.vocab_size)


def main(cfg):
    torch.manual_seed(cfg["seed"])
    documents, lexicon = make_corpus(**cfg["corpus"], seed=cfg["seed"])
    tokenizer = WordPieceTokenizer(lexicon, **cfg["tokenizer"])
    model = FlexBertForMaskedLM(tokenizer.vocab_size, cfg["max_seq_len"], cfg["model"])
    print(f"n_params={sum(p.numel() for p in model.parameters()):.4e}")
    train_loader = build_dataloader(cfg, tokenizer, documents)
    optimizer = torch.optim.AdamW(model.parameters(), **cfg["optimizer"])
    warmup = cfg["scheduler"]["t_warmup"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / warmup))
    Trainer(model, train_loader, optimizer, scheduler, cfg["max_duration"], [SpeedMonitor(cfg["console_log_interval"])]).fit()


if __name__ == "__main__":
    main(CFG)
