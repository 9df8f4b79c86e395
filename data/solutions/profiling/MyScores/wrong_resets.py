# compute empties the counts.
# says: compute after each batch changes nothing
import torch


class MyScores:
    def __init__(self, classes):
        self.classes = classes
        self.reset()

    def reset(self):
        self.hits, self.total = torch.zeros(self.classes), torch.zeros(self.classes)

    def update(self, logits, labels):
        guess = logits.argmax(1)
        for c in range(self.classes):
            self.hits[c] += ((guess == c) & (labels == c)).sum()
            self.total[c] += (guess == c).sum() + (labels == c).sum()

    def compute(self):
        f1 = 2 * self.hits / self.total
        self.reset()
        return f1
