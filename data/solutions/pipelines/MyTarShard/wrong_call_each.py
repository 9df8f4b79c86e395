# A call a sample.
# says: 60 neighbours share calls: 60 calls of pread, at most 1
import os
import numpy as np


class MyTarShard:
    def __init__(self, path):
        self.index = np.load(f"{path}.npy")
        self.file = os.open(path, os.O_RDONLY)

    def read(self, positions):
        return [os.pread(self.file, int(n), int(o)) for o, n in self.index[list(positions)]] if len(positions) else []
