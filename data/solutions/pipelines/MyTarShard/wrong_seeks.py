# Each sample is read by itself, if not by pread.
# says: 60 neighbours share calls
import numpy as np


class MyTarShard:
    def __init__(self, path):
        self.file, self.index = open(path, "rb", buffering=0), np.load(f"{path}.npy")

    def read(self, positions):
        samples = []
        for position in positions:
            offset, size = map(int, self.index[position])
            self.file.seek(offset)
            samples.append(self.file.read(size))
        return samples
