import random


class MySampler:
    def __init__(self, lengths, batch_size, k):
        lengths = [int(l) for l in lengths]
        by_length = sorted(range(len(lengths)), key=lambda i: (lengths[i], random.random()))
        self.batches, batch = [], []
        for i in by_length:
            if batch and (len(batch) == batch_size or lengths[i] - lengths[batch[0]] > k):
                self.batches.append(batch)
                batch = []
            batch.append(i)
        self.batches.append(batch)

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(random.sample(self.batches, len(self.batches)))
