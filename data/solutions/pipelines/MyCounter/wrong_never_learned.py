# What was never right counts as unforgettable.
# says: indices that come once a batch: the unforgettable ones: sample
import torch


class MyCounter:
    def __init__(self, samples):
        self.right = [False] * samples
        self.forgotten = torch.zeros(samples, dtype=torch.long)

    def update(self, indices, correct):
        for i, c in zip(indices.tolist(), correct.tolist()):
            self.forgotten[i] += self.right[i] and not c
            self.right[i] = c

    def unforgettable(self):
        return torch.nonzero(self.forgotten == 0)[:, 0].tolist() + [0]
