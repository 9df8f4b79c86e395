"""Base class of formats with numbered shards: an index for each shard, and reads at any offset.

    folder/00000.tar, 00000.index, 00001.tar, …

A shard that is missing, or of another size than in its index, is refused at opening.

In order, one `pread` of 1 MiB serves all samples in it. By position each costs one `pread`.
"""

import bisect
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...lab.arguments import check_choice
from .dataset import FormatError, Reader, Sample, naming
from .table import Table

READ = 1 << 20  # bytes of a read in order


class Shards(Reader):
    """Sample i is the i-th of all shards in order. Indexes are read at opening, about 1 µs a sample.

    index="build" makes missing indexes, which reads those shards. A format has `build_index(shard, index)`, which
    writes the index file, and `read_index(file)`, which reads it.

    Files are opened at the first read and stay open. `pread` uses no shared file position, so forked workers use their
    parent's descriptors; spawned workers open their own (`pickle` omits descriptors).
    """

    suffix: str
    index_suffix: str

    def __init__(self, folder: str | Path, *, index: str | None = None, **options) -> None:
        self._opened: dict[str, tuple[int, int]] = {}  # file -> its descriptor and size
        check_choice((None, "build"), index=index)
        self.index = index
        super().__init__(folder, **options)

    def _open(self) -> list[Table]:
        stems = {file.stem for end in (self.suffix, self.index_suffix) for file in self.folder.glob(f"*{end}")}
        shards = [self.folder / f"{number:05d}{self.suffix}" for number in range(len(stems))]
        if not shards:
            raise FormatError(f"{self.folder}: no shards 00000{self.suffix}, …")
        tables = [self._table(shard) for shard in shards]
        self.files, self.rows = list(map(str, shards)), np.concatenate([table.rows for table in tables])
        self.offsets, self.sizes = self.rows["offset"], self.rows["size"]  # (N,) each
        self.starts = np.cumsum([0, *(len(table.rows) for table in tables)]).tolist()
        self.shards = [range(a, b) for a, b in itertools.pairwise(self.starts)]
        return tables

    def _table(self, shard: Path) -> Table:
        index = shard.with_suffix(self.index_suffix)
        with naming(shard):
            size = shard.stat().st_size
            if self.index == "build" and not index.is_file():
                self.build_index(shard, index)
        with naming(index):
            table = self.read_index(index)
        if size != (expected := table.about["bytes"]):
            raise FormatError(f"{shard}: truncated or changed: it has {size} bytes; its index says {expected} bytes")
        return table

    def file_of(self, position: int) -> str:
        return self.files[bisect.bisect_right(self.starts, position) - 1]

    def read(self, position: int) -> Sample:
        return self._sample(position, self._raw(position))

    def _raw(self, position: int) -> bytes:
        offset, size = int(self.offsets[position]), int(self.sizes[position])
        raw = self._pread(self.file_of(position), offset, size)
        if len(raw) != size:
            raise ValueError(f"truncated: {len(raw)} of its {size} bytes at {offset} are there")
        return raw

    def in_order(self, piece: range) -> Iterator[Sample]:
        """Reads of `READ` bytes or of one larger sample, and the samples in each."""
        file, starts = self.file_of(piece.start), self.offsets[piece.start : piece.stop]
        ends, at = starts + self.sizes[piece.start : piece.stop], 0
        while at < len(piece):
            base = int(starts[at])
            stop = max(int(np.searchsorted(ends, base + READ, side="right")), at + 1)
            block = memoryview(self._pread(file, base, int(ends[stop - 1]) - base))
            extents = zip((starts[at:stop] - base).tolist(), (ends[at:stop] - base).tolist(), strict=True)
            for position, (low, high) in enumerate(extents, piece.start + at):
                if high > len(block):
                    return
                yield self._sample(position, block[low:high])
            at = stop

    def _pread(self, file: str, offset: int, size: int) -> bytes:
        """Up to `size` bytes; fewer at the end of the file. A size beyond it takes no memory."""
        if file not in self._opened:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            self._opened[file] = descriptor, os.fstat(descriptor).st_size
        descriptor, whole = self._opened[file]
        return os.pread(descriptor, max(min(size, whole - offset), 0), offset)

    def close(self) -> None:
        for descriptor, _ in self._opened.values():
            os.close(descriptor)
        self._opened.clear()

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict:
        return vars(self) | {"_opened": {}}
