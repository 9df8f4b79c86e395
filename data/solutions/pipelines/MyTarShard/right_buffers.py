import os

import numpy as np


class MyTarShard:
    """Neighbours are read at once, headers and all, into one buffer."""

    def __init__(self, path):
        self.file, self.index = os.open(path, os.O_RDONLY), np.load(f"{path}.npy")

    def read(self, positions):
        wanted = np.unique(np.asarray(positions, dtype=int))
        found = {}
        for row in np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1):
            if not len(row):
                continue
            begin = self.index[row[0], 0]
            buffer = bytearray(int(self.index[row[-1]].sum() - begin))
            os.preadv(self.file, [buffer], int(begin))
            for position in row.tolist():
                offset, size = self.index[position] - (begin, 0)
                found[position] = bytes(buffer[offset : offset + size])
        return [found[int(position)] for position in positions]
