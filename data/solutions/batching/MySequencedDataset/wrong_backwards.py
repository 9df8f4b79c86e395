# The text is packed from its end.
# says: they are in the order of the text
import numpy as np
import torch
from helpers.batching.packed import join


class MySequencedDataset(torch.utils.data.IterableDataset):
    def __init__(self, samples, batch_size, max_length):
        self.samples, self.batch_size, self.max_length = samples, batch_size, max_length

    def __iter__(self):
        parts, room = [], self.max_length
        for sample in reversed(list(self.samples)):
            if parts and (len(sample) > room or len(parts) == self.batch_size):
                yield join(np.concatenate(parts), [len(part) for part in parts])
                parts, room = [], self.max_length
            parts.append(sample)
            room -= len(sample)
        yield join(np.concatenate(parts), [len(part) for part in parts])
