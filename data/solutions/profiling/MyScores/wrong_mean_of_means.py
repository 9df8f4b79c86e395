# The F1 of each batch, averaged.
# says: F1 of 20 batches
import torch
import torch.nn.functional as F


class MyScores:
    def __init__(self, classes):
        self.classes, self.total, self.batches = classes, torch.zeros(classes), 0

    def update(self, logits, labels):
        guess, actual = (F.one_hot(t, self.classes).float() for t in (logits.argmax(1), labels))
        self.total += 2 * (guess * actual).sum(0) / (guess.sum(0) + actual.sum(0)).clamp(min=1)
        self.batches += 1

    def compute(self):
        return self.total / self.batches
