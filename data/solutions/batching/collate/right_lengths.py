import numpy as np
import torch


def collate(samples):
    lengths = torch.tensor([len(sample) for sample in samples])
    batch = np.zeros((len(samples), int(lengths.max())), dtype=np.int32)
    for row, sample in zip(batch, samples):
        row[: len(sample)] = np.asarray(sample)
    return torch.from_numpy(batch), lengths
