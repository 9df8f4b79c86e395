#!/usr/bin/env python
"""Fine-tune a small BERT on banking-style intents (accelerate-free loop)."""
import logging
import math
import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader, Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
    set_seed,
)

logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
logger = logging.getLogger("intent")

MAX_LENGTH = 128
BATCH_SIZE = 32
EPOCHS = 40
LEARNING_RATE = 5e-4
WARMUP = 0.06

TOPICS = {
    "card_lost": "lost stolen card wallet block replace missing urgent",
    "top_up": "top up add money balance account load funds",
    "transfer": "transfer send recipient iban pending sepa payment",
    "fees": "fee charged extra cost commission why statement",
    "exchange": "exchange rate currency dollar euro pound convert",
    "pin": "pin code forgot change reset atm blocked",
    "verify": "verify identity passport document selfie upload",
    "limits": "limit maximum daily withdraw increase spending",
}
FILLER = ("i you my the a to please can could help how do is it have with for of on in was this that "
          "need want today yesterday hello thanks again still when what where").split()


def make_corpus(n, seed):
    rng = random.Random(seed)
    names = sorted(TOPICS)
    rows = []
    for _ in range(n):
        label = rng.randrange(len(names))
        length = min(56, max(5, int(rng.gauss(22, 9))))
        words = [rng.choice(TOPICS[names[label]].split()) if rng.random() < 0.3 else rng.choice(FILLER)
                 for _ in range(length)]
        rows.append((" ".join(words), label))
    return rows


def build_tokenizer():
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = sorted(set(FILLER) | {w for t in TOPICS.values() for w in t.split()})
    vocab = {w: i for i, w in enumerate(specials + words)}
    tok = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])])
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="[PAD]", unk_token="[UNK]",
                                   cls_token="[CLS]", sep_token="[SEP]")


class IntentDataset(Dataset):
    def __init__(self, rows, tokenizer):
        texts, self.labels = zip(*rows)
        self.encodings = tokenizer(list(texts), padding="max_length", truncation=True, max_length=MAX_LENGTH)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        return {
            "input_ids": self.encodings["input_ids"][idx],
            "attention_mask": self.encodings["attention_mask"][idx],
            "labels": self.labels[idx],
        }


def collate(features):
    return {k: torch.tensor([f[k] for f in features]) for k in features[0]}


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = total = 0
    for batch in loader:
        labels = batch.pop("labels")
        pred = model(**batch).logits.argmax(-1)
        correct += (pred == labels).sum().item()
        total += labels.numel()
    model.train()
    return correct / total


def main():
    set_seed(11)
    tokenizer = build_tokenizer()
    train_ds = IntentDataset(make_corpus(4096, 0), tokenizer)
    eval_ds = IntentDataset(make_corpus(128, 1), tokenizer)
    train_loader = DataLoader(train_ds, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    eval_loader = DataLoader(eval_ds, batch_size=64, collate_fn=collate)

    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=512, max_position_embeddings=160, num_labels=len(TOPICS),
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0)
    model = BertForSequenceClassification(config)
    model.train()

    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    no_decay = [p for n, p in model.named_parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}],
        lr=LEARNING_RATE, fused=True)
    total_steps = EPOCHS * math.ceil(len(train_ds) / BATCH_SIZE)
    scheduler = get_linear_schedule_with_warmup(optimizer, int(WARMUP * total_steps), total_steps)

    logger.info("params %.2fM, steps %d", sum(p.numel() for p in model.parameters()) / 1e6, total_steps)
    step = 0
    for epoch in range(EPOCHS):
        for batch in train_loader:
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 50 == 0:
                logger.info("epoch %d step %d loss %.4f lr %.2e", epoch, step, loss.item(), scheduler.get_last_lr()[0])
        logger.info("epoch %d accuracy %.4f", epoch, evaluate(model, eval_loader))


if __name__ == "__main__":
    main()
