# The notebook's own sampler, which leaves many small batches.
# says: batches have at most 32 indices, and are mostly full: to 94.0%
import numpy as np


class MySampler:
    def __init__(self, lengths, batch_size, k):
        self.batch_size, self.k = batch_size, k
        self.buckets = [[] for _ in range(max(lengths) + 1)]
        for index, length in enumerate(lengths):
            self.buckets[length].append(index)

    def __iter__(self):
        random = np.random.default_rng()
        left = np.array([len(bucket) for bucket in self.buckets])
        while total := left.sum():
            length = random.choice(len(left), p=left / total)
            low = max(length - random.integers(self.k + 1), 0)
            near = left[low : low + self.k + 1]
            size = min(self.batch_size, near.sum())
            batch = []
            for place, count in enumerate(random.multivariate_hypergeometric(near, size)):
                for _ in range(count):
                    near[place] -= 1
                    batch.append(self.buckets[low + place][near[place]])
            yield batch
