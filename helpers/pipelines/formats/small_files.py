"""One file for each sample, in a folder for each label, and a table of all files.

    folder/labels.csv                   file, label, key, bytes, crc32: one line a sample, in order
    folder/7/00000012.jpg               sample 12, of label 7; .npy for tokens

A sample costs an open, a read and a close (three system calls; from a cold cache also reads of the inode and the
folder's block), and on disk half a block, 2 KiB, on average, as each file's last block is partly empty. In return any
tool can view, replace or delete a sample.
"""

import csv
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ...lab import files
from .dataset import KINDS, SUFFIXES, Reader, Sample, checked, naming, pack

NEEDS = ()
TABLE = "labels.csv"
COLUMNS = ("file", "label", "key", "bytes", "crc32")
SHARD = 1000  # samples that a stream treats as a shard, as files have none


def write(samples: Iterable[Sample], folder: str | Path, kind: str) -> None:
    """Write a file for each sample. The folder is complete or absent."""
    with files.building(folder) as part:
        rows = []
        for position, (key, label, data) in enumerate(checked(samples, kind)):
            name, raw = f"{label}/{position:08d}.{SUFFIXES[kind]}", pack(kind, data)
            (part / name).parent.mkdir(exist_ok=True)
            (part / name).write_bytes(raw)
            rows.append((name, label, key, len(raw), zlib.crc32(raw)))
        with open(part / TABLE, "w", newline="", encoding="utf-8") as stream:
            csv.writer(stream, quoting=csv.QUOTE_NONNUMERIC).writerows([COLUMNS, *rows])


class Files(Reader):
    """Sample i is line i of the table, which is read at opening: about 2 µs a sample."""

    def _open(self) -> None:
        with naming(self.folder / TABLE):
            try:
                # Spreadsheets add a mark of the encoding.
                with open(self.folder / TABLE, newline="", encoding="utf-8-sig") as stream:
                    header, *rows = csv.reader(stream)
                self.names, labels, self.keys, sizes, sums = zip(*rows, strict=True)
                self.labels, self.sizes = np.array(labels, np.int64), np.array(sizes, np.int64)
                self.sums, self.kind = np.array(sums, np.uint32), KINDS[self.names[0].rpartition(".")[2]]
                if tuple(header) != COLUMNS:
                    raise ValueError(f"its columns are {', '.join(header)}")
            except (csv.Error, KeyError, OverflowError, ValueError) as error:
                raise ValueError(f"no samples with {', '.join(COLUMNS)} ({error})") from error
        self.shards = [range(at, min(at + SHARD, len(labels))) for at in range(0, len(labels), SHARD)]

    def file_of(self, position: int) -> str:
        return os.path.join(self.folder, self.names[position])

    def read(self, position: int) -> Sample:
        with open(self.file_of(position), "rb", buffering=0) as stream:
            return self._sample(position, stream.read())


open_ = Files
