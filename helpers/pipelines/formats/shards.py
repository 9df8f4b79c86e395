"""Base class of formats with numbered shards: an index for each shard, reads at any offset, and shards' faults.

    folder/00000.tar, 00000.idx.npz, 00001.tar, …       or any other names, in their order

Faults at opening: a shard whose index can't be read (its samples aren't counted), a shard of which only a part can be
indexed, a compressed shard, a gap in the numbers of ours, and a shard of another size than in its index, even if no
sample is lost. A missing sample is a fault when it is read.
"""

import bisect
import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from helpers.lab import files
from helpers.lab.arguments import check_choice

from .dataset import Fault, FormatError, Reader, Sample, naming

Table = dict  # a shard's index: `bytes` of the shard; `offsets` and `sizes` of its samples; and more
LARGEST = 1 << 26  # bytes of a read
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


class Shards(Reader):
    """Sample i is the i-th of all shards in order. Indexes are read at opening, about 1 µs a sample.

    index="build" rebuilds missing indexes, which reads those shards. The index of a damaged shard isn't saved, nor one
    in a folder that cannot be written: both are built at each opening.

    Files are opened at the first read and stay open. `pread` uses no shared file position, so forked workers use their
    parent's descriptors; spawned workers open their own (`pickle` omits descriptors).
    """

    suffix: str
    index_suffix: str

    def __init__(self, folder: str | Path, *, index: str | None = None, **options) -> None:
        self._opened: dict[str, int] = {}  # file -> its descriptor
        check_choice((None, "build"), index=index)
        self.index = index
        super().__init__(folder, **options)

    def read_index(self, file: Path) -> Table:
        raise NotImplementedError

    def build_index(self, shard: Path) -> tuple[Table, str]:
        """The index of a shard, and what it leaves out and why, or "". Reads the shard; saves a complete index."""
        raise NotImplementedError

    def from_shard(self, file: str, piece: range) -> Iterator[Sample]:
        """The samples of a piece of a shard, in order. May end early, or at once."""
        raise NotImplementedError

    def _open(self) -> None:
        shards = []
        for shard in self._numbered():
            try:
                shards.append((str(shard), self._table(shard)))
            except FormatError as error:
                self._raise_or_record(error.fault)
        counts = [len(table["offsets"]) for _, table in shards]
        if not sum(counts):
            reason = f"nothing in it could be opened; the first: {self.faults[0]}"
            raise FormatError(Fault(str(self.folder), None, reason))
        self.files, self.tables = [file for file, _ in shards], [table for _, table in shards]
        self.offsets, self.sizes = (self._column(name, np.int64) for name in ("offsets", "sizes"))  # (N,) each
        self.starts = np.cumsum([0, *counts]).tolist()
        self.shards = [range(a, b) for a, b in zip(self.starts, self.starts[1:], strict=False) if b > a]

    def _numbered(self) -> list[Path]:
        """The shards by name, including those of which only the index exists. A gap in our numbers is a fault."""
        ends = (self.suffix, self.index_suffix)
        stems = {file.name.removesuffix(end) for end in ends for file in self.folder.glob(f"*{end}")}
        stems = sorted(stem for stem in stems if stem and not stem.startswith("."))
        compressed = {stem: file for stem, file in self._compressed() if stem not in stems}
        for file in compressed.values():
            reason = f"compressed, so no sample can be read by its position; decompress it to *{self.suffix}"
            self._raise_or_record(Fault(str(file), None, reason))
        if not stems and not compressed:
            raise FormatError(Fault(str(self.folder), None, f"no shards; expected files *{self.suffix}"))
        ours = [int(stem) for stem in (*stems, *compressed) if stem.isdecimal() and f"{int(stem):05d}" == stem]
        for last, number in itertools.pairwise([-1, *sorted(ours)]):
            if (missing := number - last - 1) > 0:
                file = str(self.folder / f"{last + 1:05d}{self.suffix}")
                more = f", nor the next {missing - 1}" if missing > 1 else ""
                self._raise_or_record(Fault(file, None, f"no such shard{more}, though there are later ones"))
        return [self.folder / f"{stem}{self.suffix}" for stem in stems]

    def _compressed(self) -> Iterator[tuple[str, Path]]:
        """Stem and file of each compressed shard, by name."""
        ends = [self.suffix + end for end in COMPRESSED] + ([".tgz"] if self.suffix == ".tar" else [])
        for file in sorted(self.folder.glob("[!.]*")):
            for end in ends:
                if file.name.endswith(end):
                    yield file.name.removesuffix(end), file

    def _table(self, shard: Path) -> Table:
        index = shard.with_suffix(self.index_suffix)
        if index.is_file():
            with naming(index, "not a readable index"):
                table = self.read_index(index)
                _check_extents(table)
        elif self.index == "build":
            with naming(shard):
                table, why = self.build_index(shard)
            if why:
                self._raise_or_record(Fault(str(shard), None, why))
        else:
            raise FormatError(Fault(str(index), None, 'no such index of the shard; index="build" makes one'))
        size = shard.stat().st_size if shard.is_file() else None
        if size != table["bytes"]:
            reason = "no such shard" if size is None else f"truncated or changed: it has {size} bytes"
            self._raise_or_record(Fault(str(shard), None, f"{reason}; its index says {table['bytes']} bytes"))
        return table

    def _column(self, name: str, dtype: type) -> np.ndarray:
        """A column of the indexes of all shards."""
        return np.concatenate([np.asarray(table[name], dtype) for table in self.tables])

    def _locate(self, position: int) -> tuple[str, int]:
        """The shard's file that contains a sample, and the sample's number within it."""
        shard = bisect.bisect_right(self.starts, position) - 1
        return self.files[shard], position - self.starts[shard]

    def file_of(self, position: int) -> str:
        return self._locate(position)[0]

    def in_order(self, piece: range) -> Iterator[Sample]:
        return self.from_shard(self.file_of(piece.start), piece)

    def _raw(self, position: int) -> bytes:
        """A sample's bytes, at the offset and of the size in the index."""
        offset, size = int(self.offsets[position]), int(self.sizes[position])
        raw = self._pread(self.file_of(position), offset, size)
        if len(raw) != size:
            raise ValueError(f"truncated: {len(raw)} of its {size} bytes at {offset} are there")
        return raw

    def _pread(self, file: str, offset: int, size: int) -> bytes:
        """Up to `size` bytes; fewer at the end of the file. A size beyond it takes no memory."""
        if file not in self._opened:
            self._opened[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        parts, left = [], size
        descriptor = self._opened[file]
        while left and (part := os.pread(descriptor, left if left < LARGEST else LARGEST, offset + size - left)):
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        for descriptor in self._opened.values():
            os.close(descriptor)
        self._opened.clear()

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict:
        return vars(self) | {"_opened": {}}


def save_index(index: Path, content: bytes | str) -> None:
    """Write an index, unless its folder is read-only."""
    try:
        files.write(index, content)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise


def _check_extents(table: Table) -> None:
    """Refuse an index whose samples overlap, or lie outside of the shard that it describes."""
    offsets, sizes = (np.asarray(table[name], np.int64) for name in ("offsets", "sizes"))  # (N,)
    if offsets.ndim != 1 or offsets.shape != sizes.shape:
        raise ValueError(f"offsets and sizes have the shapes {offsets.shape} and {sizes.shape}")
    ends = np.append(offsets[1:], min(table["bytes"], 2**63 - 1))  # where the next sample begins, at the latest
    if (offsets < 0).any() or (sizes < 0).any() or (ends < offsets).any() or (sizes > ends - offsets).any():
        raise ValueError("its samples overlap, or lie outside of the shard")
