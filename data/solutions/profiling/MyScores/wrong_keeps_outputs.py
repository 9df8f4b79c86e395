# All outputs so far are kept.
# says: 50 batches take no more memory than 5
import torch


class MyScores:
    def __init__(self, classes):
        self.classes, self.guessed, self.actual = classes, [], []

    def update(self, logits, labels):
        self.guessed.append(logits.argmax(1))
        self.actual.append(labels)

    def compute(self):
        g, a = torch.cat(self.guessed), torch.cat(self.actual)
        return [2 * ((g == c) & (a == c)).sum() / ((g == c).sum() + (a == c).sum()) for c in range(self.classes)]
