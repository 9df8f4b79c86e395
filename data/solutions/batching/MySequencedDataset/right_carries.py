import numpy as np
import torch
from helpers.batching.packed import join


class MySequencedDataset(torch.utils.data.IterableDataset):
    def __init__(self, samples, batch_size, max_length):
        self.samples, self.size, self.room = samples, batch_size or len(samples), max_length

    def __iter__(self):
        held = []
        for at in range(len(self.samples)):
            sample = np.asarray(self.samples[at])[: self.room]
            if held and (len(held) == self.size or sum(map(len, held)) + len(sample) > self.room):
                yield join(np.concatenate(held), [len(s) for s in held])
                held = []
            held.append(sample)
        yield join(np.concatenate(held), [len(s) for s in held])
