# Token ids are floats, which no embedding takes.
# says: is padded to its longest sample: floats
import torch


def collate(samples):
    batch = torch.zeros(len(samples), max(map(len, samples)))
    for row, sample in zip(batch, samples):
        row[: len(sample)] = torch.as_tensor(sample)
    return batch
