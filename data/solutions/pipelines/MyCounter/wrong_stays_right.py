# What was right once counts as right at the last presentation, too: one tensor for both.
# says: indices that come once a batch: sample
import torch


class MyCounter:
    def __init__(self, samples):
        self.right = self.learned = torch.zeros(samples, dtype=torch.bool)
        self.forgotten = torch.zeros(samples, dtype=torch.long)

    def update(self, indices, correct):
        for i, c in zip(indices.tolist(), correct.tolist()):
            self.forgotten[i] += int(self.right[i]) and not c
            self.learned[i] |= c

    def unforgettable(self):
        return torch.nonzero(self.learned & (self.forgotten == 0))[:, 0]
