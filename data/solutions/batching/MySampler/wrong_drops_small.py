# Batches that aren't full are dropped.
# says: every index comes once:
import random


class MySampler:
    def __init__(self, lengths, batch_size, k):
        self.windows, self.batch_size = {}, batch_size
        for i, l in enumerate(lengths):
            self.windows.setdefault(int(l) // (k + 1), []).append(i)

    def __iter__(self):
        batches = []
        for w in self.windows.values():
            random.shuffle(w)
            while len(w) >= self.batch_size:
                batches.append(w[: self.batch_size])
                w = w[self.batch_size :]
        random.shuffle(batches)
        return iter(batches)
