# Right, but an epoch begins with sorting all samples.
# says: a batch takes as long from many samples as from few
import numpy as np


class MySampler:
    def __init__(self, lengths, batch_size, k):
        self.lengths, self.batch_size, self.k = np.asarray(lengths), batch_size, k

    def __iter__(self):
        random = np.random.default_rng()
        window = (self.lengths + random.integers(self.k + 1)) // (self.k + 1)
        order = np.lexsort((random.random(len(window)), window))
        ends = np.flatnonzero(np.diff(window[order])) + 1
        batches = []
        for part in np.split(order, ends):
            batches += [part[i : i + self.batch_size] for i in range(0, len(part), self.batch_size)]
        random.shuffle(batches)
        yield from batches
