# An index counts once a batch, however often it comes.
# says: indices that repeat in a batch: sample
import torch


class MyCounter:
    def __init__(self, samples):
        self.right = torch.zeros(samples, dtype=torch.bool)
        self.learned = torch.zeros(samples, dtype=torch.bool)
        self.forgotten = torch.zeros(samples, dtype=torch.long)

    def update(self, indices, correct):
        self.forgotten[indices] += self.right[indices] & ~correct
        self.learned[indices] |= correct
        self.right[indices] = correct

    def unforgettable(self):
        return torch.nonzero(self.learned & (self.forgotten == 0))[:, 0]
