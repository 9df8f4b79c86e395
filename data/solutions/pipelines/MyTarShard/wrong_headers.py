# Samples are taken to lie one after the other, without headers and padding.
# says: read(range(60)) gives each sample: sample 1 has
import os
import numpy as np


class MyTarShard:
    def __init__(self, path):
        self.index = np.load(f"{path}.npy")
        self.file = os.open(path, os.O_RDONLY)

    def read(self, positions):
        found, wanted = {}, sorted(set(positions))
        while wanted:
            run = [wanted.pop(0)]
            while wanted and wanted[0] == run[-1] + 1:
                run.append(wanted.pop(0))
            begin, end = int(self.index[run[0], 0]), int(self.index[run[-1]].sum())
            data = os.pread(self.file, end - begin, begin)
            for p in run:
                n = int(self.index[p, 1])
                found[p], data = data[:n], data[n:]
        return [found[p] for p in positions]
