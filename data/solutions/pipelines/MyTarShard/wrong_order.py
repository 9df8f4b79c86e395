# The samples come in the file's order, each once.
# says: gives each sample in this order: 6 samples for 7 positions
import os
import numpy as np


class MyTarShard:
    def __init__(self, path):
        self.index = np.load(f"{path}.npy")
        self.file = os.open(path, os.O_RDONLY)

    def read(self, positions):
        out, run = [], []
        for p in sorted(set(positions)) + [None]:
            if run and (p is None or p != run[-1] + 1):
                begin, end = int(self.index[run[0], 0]), int(self.index[run[-1]].sum())
                data = os.pread(self.file, end - begin, begin)
                out += [data[o - begin : o - begin + n] for o, n in self.index[run].tolist()]
                run = []
            run.append(p)
        return out
