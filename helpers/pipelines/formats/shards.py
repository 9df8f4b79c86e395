"""What formats of numbered shards share: an index for each, reads at any offset, and what is wrong with a shard.

    folder/00000.tar, 00000.idx.json, 00001.tar, …

A shard whose index can't be read is a fault, and its samples are not counted; so is a gap in the numbers, and a shard
of another size than its index says, even where no sample is lost. Of what is gone each sample says so when it is read.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from helpers.lab.arguments import check_choice

from .dataset import Fault, FormatError, Reader, Sample, naming

Table = dict  # what an index says of a shard: `bytes` of the shard; `offsets` and `sizes` of its samples; and more


class Shards(Reader):
    """Sample i is the i-th of all shards in order. Indexes are read at opening, about 1 µs a sample.

    index="build" makes missing indexes, which reads those shards; of a damaged shard it is not kept on disk.

    Files are opened when first read and stay open. `pread` has no position that processes could share, so a forked
    worker goes on with what its parent opened; one that is spawned opens its own (`pickle` leaves it behind).
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
        """The index of a shard, and why it isn't all of it: samples after that are not in the index. Reads the shard.

        An index that is all of it is kept on disk.
        """
        raise NotImplementedError

    def from_shard(self, file: str, piece: range) -> Iterator[Sample]:
        """The samples of a piece from a shard's start on, by the format's own library. May end early."""
        raise NotImplementedError

    def _open(self) -> None:
        shards = []
        for shard in self._numbered():
            try:
                shards.append((str(shard), self._table(shard)))
            except FormatError as error:
                self._admit(error.fault)
        counts = [len(table["offsets"]) for _, table in shards]
        if not sum(counts):
            said = f"nothing in it could be opened; the first: {self.faults[0]}"
            raise FormatError(Fault(str(self.folder), None, said))
        self.files, self.tables = [file for file, _ in shards], [table for _, table in shards]
        self.offsets, self.sizes = (self._column(name, np.int64) for name in ("offsets", "sizes"))  # (N,) each
        self.starts = np.cumsum([0, *counts]).tolist()
        self.shards = [range(a, b) for a, b in zip(self.starts, self.starts[1:], strict=False) if b > a]

    def _numbered(self) -> list[Path]:
        """The shards, also those of which only the index is left. A gap in their numbers is a fault."""
        ends = (self.suffix, self.index_suffix)
        stems = {file.name.removesuffix(end) for end in ends for file in self.folder.glob(f"*{end}")}
        stems = sorted(filter(str.isdigit, stems))
        if not stems:
            raise FormatError(Fault(str(self.folder), None, f"no shards; expected 00000{self.suffix} and on"))
        for number in sorted(set(range(int(stems[-1]) + 1)) - set(map(int, stems))):
            file = str(self.folder / f"{number:05d}{self.suffix}")
            self._admit(Fault(file, None, "no such shard, though there are later ones"))
        return [self.folder / f"{stem}{self.suffix}" for stem in stems]

    def _table(self, shard: Path) -> Table:
        index = shard.with_suffix(self.index_suffix)
        if index.is_file():
            with naming(index, "not a readable index"):
                table = self.read_index(index)
        elif self.index == "build":
            with naming(shard):
                table, why = self.build_index(shard)
            if why:
                said = (
                    f"truncated or damaged ({why}); what comes after its first {len(table['offsets'])} samples is lost"
                )
                self._admit(Fault(str(shard), None, said))
                return table
        else:
            raise FormatError(Fault(str(index), None, 'no such index of the shard; index="build" makes one'))
        size = shard.stat().st_size if shard.is_file() else None
        if size != table["bytes"]:
            said = "no such shard" if size is None else f"truncated or changed: it has {size} bytes"
            self._admit(Fault(str(shard), None, f"{said}; its index says {table['bytes']} bytes"))
        return table

    def _column(self, name: str, dtype: type) -> np.ndarray:
        """A column of the indexes of all shards."""
        return np.concatenate([np.asarray(table[name], dtype) for table in self.tables])

    def _place(self, position: int) -> tuple[str, int]:
        """The shard that a sample lies in, and which of its samples it is."""
        shard = int(np.searchsorted(self.starts, position, side="right")) - 1
        return self.files[shard], position - self.starts[shard]

    def file_of(self, position: int) -> str:
        return self._place(position)[0]

    def by_library(self, piece: range) -> Iterator[Sample]:
        file, within = self._place(piece.start)
        return iter(()) if within else self.from_shard(file, piece)

    def _raw(self, position: int) -> bytes:
        """The bytes of a sample that its index points to."""
        offset, size = int(self.offsets[position]), int(self.sizes[position])
        raw = self._pread(self.file_of(position), offset, size)
        if len(raw) != size:
            raise ValueError(f"truncated: {len(raw)} of its {size} bytes at {offset} are there")
        return raw

    def _pread(self, file: str, offset: int, size: int) -> bytes:
        """Up to `size` bytes; fewer at the end of the file."""
        if file not in self._opened:
            self._opened[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        parts, left = [], size
        while left and (part := os.pread(self._opened[file], left, offset + size - left)):
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
