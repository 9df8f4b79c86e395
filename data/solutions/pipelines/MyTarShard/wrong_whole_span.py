# One call for all, with what lies between.
# says: there, nothing between far samples is read
import os
import numpy as np


class MyTarShard:
    def __init__(self, path):
        self.index = np.load(f"{path}.npy")
        self.file = os.open(path, os.O_RDONLY)

    def read(self, positions):
        if not len(positions):
            return []
        chosen = self.index[list(positions)]
        begin, end = int(chosen[:, 0].min()), int(chosen.sum(1).max())
        data = os.pread(self.file, end - begin, begin)
        return [data[o - begin : o - begin + n] for o, n in chosen.tolist()]
