"""A text classifier, whose trainer keeps statistics of all gradients."""

import argparse
from collections import defaultdict

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true", help="read the statistics every 50th step")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--tiny", action="store_true", default=not torch.cuda.is_available())
args = parser.parse_args()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, LAYERS, BATCH, LENGTH = (32, 2, 4, 8) if args.tiny else (768, 16, 32, 128)


class Classifier(nn.Module):
    def __init__(self, vocabulary=30522, classes=20):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, WIDTH // 16, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, classes)
        self.register_buffer("numbers", torch.arange(LENGTH))

    def forward(self, ids):
        x = self.words(ids) + self.places(self.numbers)
        return self.head(self.layers(x).mean(1))


class Trainer:
    def __init__(self, model, batches):
        self.model, self.batches = model, batches
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.norms, self.largest = defaultdict(list), defaultdict(list)

    def watch_gradients(self):
        for name, weight in self.model.named_parameters():
            norm = weight.grad.norm().item()
            largest = weight.grad.abs().max().item()
            self.norms[name].append(norm)
            self.largest[name].append(largest)

    def train(self, steps):
        for step in range(steps):
            ids, labels = self.batches[step % len(self.batches)]
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = nn.functional.cross_entropy(self.model(ids), labels)
            loss.backward()
            if step % (50 if args.fixed else 1) == 0:
                self.watch_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()


torch.manual_seed(0)
batches = [
    (torch.randint(30522, (BATCH, LENGTH), device=DEVICE), torch.randint(20, (BATCH,), device=DEVICE))
    for _ in range(16)
]
print("loss", Trainer(Classifier().to(DEVICE), batches).train(args.steps))
