# Off by one: a window of k + 2 lengths.
# says: lengths in a batch differ by at most k = 10: at most 11
import random


class MySampler:
    def __init__(self, lengths, batch_size, k):
        self.windows, self.batch_size = {}, batch_size
        for i, l in enumerate(lengths):
            self.windows.setdefault(int(l) // (k + 2), []).append(i)

    def __iter__(self):
        batches = []
        for w in self.windows.values():
            w = random.sample(w, len(w))
            batches += [w[i : i + self.batch_size] for i in range(0, len(w), self.batch_size)]
        random.shuffle(batches)
        return iter(batches)
