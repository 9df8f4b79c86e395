# Short batches come first, long ones last.
# says: short and long batches come in random order: correlation
import numpy as np


class MySampler:
    def __init__(self, lengths, batch_size, k):
        self.lengths, self.batch_size = np.asarray(lengths), batch_size

    def __iter__(self):
        order = np.argsort(self.lengths, kind="stable")
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]
