"""Our memory-mapped format, one file: a table of the samples (see `table`), and their data one after the other.

A sample's data is a slice of the mapped file: no copy and no system call; the kernel loads pages on access, and all
processes of a machine share them. The data begins at a multiple of 4,096 and offsets are multiples of the dtype's size,
so tokens are aligned without a copy.

On disk a sample takes 32 bytes, its key and its data. Data is written twice, as the table's size is known last.
Changing a sample means writing the file again. A file that shrinks while it is mapped kills its reader (SIGBUS), as any
mapped file does: replace it by renaming.
"""

import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ...lab import files
from . import table
from .dataset import FormatError, Reader, Sample, checked, naming

NEEDS = ()
NAME = "samples.mapped"
PAGE = 4096
AHEAD = 4 << 20  # bytes
WILLNEED = getattr(mmap, "MADV_WILLNEED", None)


def write(samples: Iterable[Sample], folder: str | Path, kind: str) -> None:
    """Write the file. The folder is complete or absent."""
    entries, end, dtype = [], 0, ""
    with files.building(folder) as part, tempfile.TemporaryFile(dir=part) as payload:
        for key, label, data in checked(samples, kind):
            dtype = data.dtype.str[1:]
            payload.write(data)
            entries.append((end, data.nbytes, label, zlib.crc32(data), key.encode()))
            end += data.nbytes
        head = table.pack({"kind": kind, "dtype": dtype, "bytes": end}, entries)
        payload.seek(0)
        with open(part / NAME, "wb") as stream:
            stream.write(head.ljust(_page_end(len(head)), b"\0"))
            shutil.copyfileobj(payload, stream, 1 << 20)
            stream.flush()
            os.fsync(stream.fileno())  # before the rename: a crash can't leave an incomplete file under the name


class Mapped(Reader):
    """Sample i is a slice of the file, which is mapped at the first access, in each process."""

    _map: mmap.mmap | None = None

    def _open(self) -> None:
        self.file = str(self.folder / NAME)
        with naming(self.file), open(self.file, "rb") as stream:
            self.file_bytes = os.fstat(stream.fileno()).st_size
            entries = table.read(stream, self.file_bytes)
            start = _page_end(stream.tell())
        if self.file_bytes != (expected := start + entries.about["bytes"]):
            raise FormatError(f"{self.file}: truncated or changed: it has {self.file_bytes} bytes of {expected}")
        self.kind, self.dtype = entries.about["kind"], np.dtype("<" + entries.about["dtype"])
        self.offsets, self.sizes = entries.rows["offset"] + start, entries.rows["size"]  # within the file
        self.labels, self.sums, self.keys = entries.rows["label"], entries.rows["crc32"], table.Keys([entries])
        self.shards = [range(len(entries.rows))]

    def file_of(self, position: int) -> str:
        return self.file

    def close(self) -> None:
        self._map = None  # unmapped when the last slice of it is freed

    def __getstate__(self) -> dict:
        return vars(self) | {"_map": None}

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            with open(self.file, "rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map

    def in_order(self, piece: range) -> Iterator[Sample]:
        """The samples of a piece; the kernel reads the next `AHEAD` bytes meanwhile."""
        ahead = 0
        for position in piece:
            if (start := int(self.offsets[position])) >= ahead:
                self._read_ahead(start, 2 * AHEAD)
                ahead = start + AHEAD
            yield self._sample(position, self._data(position))

    def read(self, position: int) -> Sample:
        # One read of the sample's pages alone: a fault would read up to some MiB around its page.
        self._read_ahead(int(self.offsets[position]), int(self.sizes[position]))
        return self._sample(position, self._data(position))

    def _read_ahead(self, start: int, size: int) -> None:
        """Let the kernel read a part of the file, where the system can, without waiting for it."""
        page, stop = start - start % mmap.PAGESIZE, min(start + size, self.file_bytes)
        if WILLNEED is not None and page < stop:
            self._mapped().madvise(WILLNEED, page, stop - page)

    def _data(self, position: int) -> np.ndarray:
        start, size = int(self.offsets[position]), int(self.sizes[position])
        count = size // self.dtype.itemsize
        return np.frombuffer(self._mapped(), self.dtype, count, start) if size else np.empty(0, self.dtype)


open_ = Mapped


def _page_end(size: int) -> int:
    """The first multiple of `PAGE` at or after a size."""
    return -(-size // PAGE) * PAGE
