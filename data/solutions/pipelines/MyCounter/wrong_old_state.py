# Each occurrence is compared with the state before the batch.
# says: indices that repeat in a batch: sample
import torch


class MyCounter:
    def __init__(self, samples):
        self.right = torch.zeros(samples, dtype=torch.bool)
        self.learned = torch.zeros(samples, dtype=torch.bool)
        self.forgotten = torch.zeros(samples, dtype=torch.long)

    def update(self, indices, correct):
        lost = (self.right[indices] & ~correct).long()
        self.forgotten.index_add_(0, indices, lost)
        for i, c in zip(indices, correct):
            self.learned[i] |= c
            self.right[i] = c

    def unforgettable(self):
        return torch.nonzero(self.learned & (self.forgotten == 0))[:, 0]
