"""Base class of formats with numbered shards: an index for each shard, reads at any offset, and shards' faults.

    folder/00000.tar, 00000.index, 00001.tar, …

Faults at opening: a shard that is missing, or whose index can't be read (their samples aren't counted), and a shard of
another size than in its index, even if no sample is lost. A missing sample is a fault when it is read.

In order, one `pread` of 1 MiB serves all samples in it. By position each costs one `pread`.
"""

import bisect
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ...lab import files
from ...lab.arguments import check_choice
from .dataset import Fault, FormatError, Reader, Sample, naming
from .table import Table

READ = 1 << 20  # bytes of a read in order


class Shards(Reader):
    """Sample i is the i-th of all shards in order. Indexes are read at opening, about 1 µs a sample.

    index="build" makes missing indexes, which reads those shards; a damaged shard gets none, and is a fault. A format
    has `build_index(shard)`, which returns the index file's content, and `read_index(file)`, which reads it.

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
        found = [file.stem for end in (self.suffix, self.index_suffix) for file in self.folder.glob(f"*{end}")]
        count = 1 + max((int(stem) for stem in found if stem.isdecimal()), default=-1)
        tables = {}
        for shard in (self.folder / f"{number:05d}{self.suffix}" for number in range(count)):
            try:
                tables[str(shard)] = self._table(shard)
            except FormatError as error:
                self._raise_or_record(error.fault)
        if not tables:
            reason = f"no shards 00000{self.suffix}, … that can be opened"
            first = f"; the first: {self.faults[0]}" if self.faults else ""
            raise FormatError(Fault(str(self.folder), None, reason + first))
        self.files, self.rows = list(tables), np.concatenate([table.rows for table in tables.values()])
        self.offsets, self.sizes = self.rows["offset"], self.rows["size"]  # (N,) each
        self.starts = np.cumsum([0, *(len(table.rows) for table in tables.values())]).tolist()
        self.shards = [range(a, b) for a, b in itertools.pairwise(self.starts)]
        return list(tables.values())

    def _table(self, shard: Path) -> Table:
        index = shard.with_suffix(self.index_suffix)
        if not index.is_file():
            if not shard.is_file():
                raise FormatError(Fault(str(shard), None, "no such shard, though there are later ones"))
            if self.index != "build":
                raise FormatError(Fault(str(index), None, 'no such index of the shard; index="build" makes one'))
            with naming(shard):
                files.write(index, self.build_index(shard))
        with naming(index):
            table = self.read_index(index)
        size = shard.stat().st_size if shard.is_file() else None
        if size != (expected := table.about["bytes"]):
            reason = "no such shard" if size is None else f"truncated or changed: it has {size} bytes"
            self._raise_or_record(Fault(str(shard), None, f"{reason}; its index says {expected} bytes"))
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
            descriptor = os.open(files.regular(file), os.O_RDONLY | os.O_CLOEXEC)
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
