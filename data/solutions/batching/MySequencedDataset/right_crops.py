import torch


class MySequencedDataset(torch.utils.data.IterableDataset):
    def __init__(self, samples, batch_size, max_length):
        self.samples, self.batch_size, self.max_length = samples, batch_size, max_length

    def __iter__(self):
        tokens, offsets = [], [0]
        for sample in self.samples:
            tokens += [int(t) for t in sample][: self.max_length - len(tokens)]
            offsets.append(len(tokens))
            if len(tokens) == self.max_length or len(offsets) - 1 == self.batch_size:
                yield torch.tensor(tokens), torch.tensor(offsets)
                tokens, offsets = [], [0]
        if tokens:
            yield torch.tensor(tokens), torch.tensor(offsets)
