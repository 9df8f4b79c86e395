import torch


class MyCounter:
    def __init__(self, samples):
        self.right = torch.zeros(samples, dtype=torch.bool)
        self.learned = torch.zeros(samples, dtype=torch.bool)
        self.forgotten = torch.zeros(samples, dtype=torch.long)

    def update(self, indices, correct):
        for i, c in zip(indices.tolist(), correct.tolist()):
            if self.right[i] and not c:
                self.forgotten[i] += 1
            self.learned[i] |= c
            self.right[i] = c

    def unforgettable(self):
        return torch.nonzero(self.learned & (self.forgotten == 0))[:, 0]
