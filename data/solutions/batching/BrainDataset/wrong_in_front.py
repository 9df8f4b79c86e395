# The padding stands before the sample.
# says: each sample is cut and padded
import torch


class BrainDataset(torch.utils.data.Dataset):
    def __init__(self, samples, max_length=640):
        self.samples, self.max_length = samples, max_length

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        ids = torch.as_tensor(self.samples[index][: self.max_length])
        return torch.nn.functional.pad(ids, (self.max_length - len(ids), 0))
