# Each length's samples are searched for among all of them, for each sample anew where it is made.
# says: making it takes as long a sample
import numpy as np


class BalancedSampler:
    def __init__(self, lengths, batch_size, k):
        lengths = np.asarray(lengths)
        self.batches, window, ends = [], lengths // (k + 1), {}
        for index in range(0, len(lengths), 12):  # counts what came before, each time from the beginning
            ends[index] = int((window[:index] == window[index]).sum())
        order = np.lexsort((np.random.random(len(window)), window))
        for part in np.split(order, np.flatnonzero(np.diff(window[order])) + 1):
            self.batches += [part[i : i + batch_size].tolist() for i in range(0, len(part), batch_size)]

    def __iter__(self):
        for place in np.random.permutation(len(self.batches)):
            yield self.batches[place]
