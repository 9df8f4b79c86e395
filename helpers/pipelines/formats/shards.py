"""Base class of formats with numbered shards: an index for each shard, reads at any offset, and shards' faults.

    folder/00000.tar, 00000.index, 00001.tar, …         or any other names, in their order

Faults at opening: a shard whose index can't be read (its samples aren't counted), a shard of which only a part can be
indexed, a compressed shard, a gap in the numbers of ours, and a shard of another size than in its index, even if no
sample is lost. A missing sample is a fault when it is read.

In order, one `pread` of 1 MiB serves all samples in it. By position each costs one `pread`.
"""

import bisect
import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from helpers.lab import files
from helpers.lab.arguments import check_choice

from .dataset import Fault, FormatError, Reader, Sample, naming
from .table import Table

READ = 1 << 20  # bytes of a read in order


class Shards(Reader):
    """Sample i is the i-th of all shards in order. Indexes are read at opening, about 1 µs a sample.

    index="build" rebuilds missing indexes, which reads those shards. The index of a damaged shard isn't saved, nor one
    in a folder that cannot be written: both are built at each opening.

    Files are opened at the first read and stay open. `pread` uses no shared file position, so forked workers use their
    parent's descriptors; spawned workers open their own (`pickle` omits descriptors).
    """

    suffix: str
    index_suffix: str
    compressed: tuple[str, ...]  # suffixes of shards that only a stream could read

    def __init__(self, folder: str | Path, *, index: str | None = None, **options) -> None:
        self._opened: dict[str, tuple[int, int]] = {}  # file -> its descriptor and size
        check_choice((None, "build"), index=index)
        self.index = index
        super().__init__(folder, **options)

    def read_index(self, file: Path) -> Table:
        raise NotImplementedError

    def build_index(self, shard: Path) -> tuple[Table, bytes, str]:
        """The index of a shard, its file's content, and what it leaves out and why, or ""."""
        raise NotImplementedError

    def _open(self) -> list[Table]:
        tables = {}
        for shard in self._shard_files():
            try:
                tables[str(shard)] = self._table(shard)
            except FormatError as error:
                self._raise_or_record(error.fault)
        rows = [table.rows for table in tables.values()]
        if not any(map(len, rows)):
            reason = f"nothing in it could be opened; the first: {self.faults[0]}"
            raise FormatError(Fault(str(self.folder), None, reason))
        self.files, self.rows = list(tables), np.concatenate(rows)
        self.offsets, self.sizes = self.rows["offset"], self.rows["size"]  # (N,) each
        self.starts = np.cumsum([0, *map(len, rows)]).tolist()
        self.shards = [range(a, b) for a, b in itertools.pairwise(self.starts) if b > a]
        return list(tables.values())

    def _shard_files(self) -> list[Path]:
        """The shards by name, including those of which only the index exists, and the faults that their names show."""
        plain, compressed = self._by_stem(self.suffix, self.index_suffix), self._by_stem(*self.compressed)
        for stem in sorted(compressed.keys() - plain.keys()):
            reason = f"compressed, so no sample can be read by its position; decompress it to *{self.suffix}"
            self._raise_or_record(Fault(str(compressed[stem]), None, reason))
        stems = plain | compressed
        if not stems:
            raise FormatError(Fault(str(self.folder), None, f"no shards; expected files *{self.suffix}"))
        ours = sorted(int(stem) for stem in stems if stem.isdecimal() and f"{int(stem):05d}" == stem)
        for last, number in itertools.pairwise([-1, *ours]):
            if missing := number - last - 1:
                more = f", nor the next {missing - 1}" if missing > 1 else ""
                reason = f"no such shard{more}, though there are later ones"
                self._raise_or_record(Fault(str(self.folder / f"{last + 1:05d}{self.suffix}"), None, reason))
        return [self.folder / f"{stem}{self.suffix}" for stem in sorted(plain)]

    def _by_stem(self, *ends: str) -> dict[str, Path]:
        return {file.name.removesuffix(end): file for end in ends for file in self.folder.glob(f"[!.]*{end}")}

    def _table(self, shard: Path) -> Table:
        if shard.exists() and not shard.is_file():  # reading a pipe would wait for ever
            raise FormatError(Fault(str(shard), None, "not a regular file"))
        index = shard.with_suffix(self.index_suffix)
        if index.is_file():
            with naming(index, "not a readable index"):
                table = self.read_index(index)
        elif self.index == "build":
            with naming(shard):
                table, content, reason = self.build_index(shard)
            if reason:
                self._raise_or_record(Fault(str(shard), None, reason))
            else:
                with contextlib.suppress(OSError):  # of a folder that is read-only
                    files.write(index, content)
        else:
            raise FormatError(Fault(str(index), None, 'no such index of the shard; index="build" makes one'))
        size = shard.stat().st_size if shard.is_file() else None
        if size != (expected := table.about["bytes"]):
            reason = "no such shard" if size is None else f"truncated or changed: it has {size} bytes"
            self._raise_or_record(Fault(str(shard), None, f"{reason}; its index says {expected} bytes"))
        return table

    def _locate(self, position: int) -> tuple[str, int]:
        """The shard's file that contains a sample, and the sample's number within it."""
        shard = bisect.bisect_right(self.starts, position) - 1
        return self.files[shard], position - self.starts[shard]

    def file_of(self, position: int) -> str:
        return self._locate(position)[0]

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
