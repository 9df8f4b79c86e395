import torch
import torch.nn.functional as F


def collate(samples):
    longest = max(sample.size(0) for sample in samples)
    tokens = torch.stack([F.pad(sample.long(), (0, longest - sample.size(0))) for sample in samples])
    return {"tokens": tokens, "mask": tokens != 0}
