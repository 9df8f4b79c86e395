# Each sample is a sequence of its own: nothing is packed.
# says: samples share sequences
import numpy as np
import torch
from helpers.batching.packed import join


class MySequencedDataset(torch.utils.data.IterableDataset):
    def __init__(self, samples, batch_size, max_length):
        self.samples, self.batch_size, self.max_length = samples, batch_size, max_length

    def __iter__(self):
        for sample in self.samples:
            yield join(np.asarray(sample)[: self.max_length], [min(len(sample), self.max_length)])
