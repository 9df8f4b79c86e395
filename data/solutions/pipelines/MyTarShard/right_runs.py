import os

import numpy as np


class TarShard:
    def __init__(self, path):
        self.index = np.load(f"{path}.npy")
        self.file = os.open(path, os.O_RDONLY)

    def __getitem__(self, position):
        offset, size = self.index[position].tolist()
        return os.pread(self.file, size, offset)


class MyTarShard(TarShard):
    def read(self, positions):
        found, wanted = {}, sorted(set(positions))
        while wanted:
            run = [wanted.pop(0)]
            while wanted and wanted[0] == run[-1] + 1:
                run.append(wanted.pop(0))
            begin = int(self.index[run[0], 0])
            end = int(self.index[run[-1]].sum())
            data = os.pread(self.file, end - begin, begin)
            for position in run:
                offset, size = (self.index[position] - [begin, 0]).tolist()
                found[position] = data[offset : offset + size]
        return [found[position] for position in positions]
