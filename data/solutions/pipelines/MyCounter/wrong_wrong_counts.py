# Every wrong answer counts, also of what was never right.
# says: indices that come once a batch: sample
import torch


class MyCounter:
    def __init__(self, samples):
        self.learned = [False] * samples
        self.forgotten = [0] * samples

    def update(self, indices, correct):
        for i, c in zip(indices.tolist(), correct.tolist()):
            self.forgotten[i] += not c
            self.learned[i] = self.learned[i] or c

    def unforgettable(self):
        return torch.tensor([i for i, n in enumerate(self.forgotten) if n == 0 and self.learned[i]])
