# No positions have no first.
# says: read([]) gives none: ValueError
import os
import numpy as np


class MyTarShard:
    def __init__(self, path):
        self.index = np.load(f"{path}.npy")
        self.file = os.open(path, os.O_RDONLY)

    def read(self, positions):
        first, found = min(positions), {}
        run = [first]
        for p in sorted(set(positions) - {first}) + [None]:
            if p is None or p != run[-1] + 1:
                begin, end = int(self.index[run[0], 0]), int(self.index[run[-1]].sum())
                data = os.pread(self.file, end - begin, begin)
                for q, (o, n) in zip(run, self.index[run].tolist()):
                    found[q] = data[o - begin : o - begin + n]
                run = []
            run.append(p)
        return [found[p] for p in positions]
