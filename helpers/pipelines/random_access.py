"""Readers of a sample by its position, which the libraries don't have: tar shards with an index, and a mapped file.

    folder/00000.tar        00000012.jpg, 00000012.json ({"key": …, "label": …}), 00000013.jpg, … by webdataset
    folder/00000.index      a table of its samples

    folder/samples.mapped   a table, and from the next multiple of 4,096 bytes on all data, one after the other

A table is a line of JSON, 32 bytes a sample (offset, size, label, checksum, length of the key), and the keys. It gives
labels, keys and a count without reading any data.

Tar: any tar reader reads a shard from its start. By the index a sample is one `pread`, and in order one of 1 MiB serves
all samples in it, at some 3 µs of Python each; webdataset's reader parses two members a sample in Python, more than ten
times as much. On disk a sample takes two tar headers and one block for its json, and up to half a KiB of padding.

Mapped: a sample is a slice of the mapped file, without a copy or a system call; the kernel loads pages on access, and
all processes of a machine share them. Data is written twice, as the table's size is known last. A file that shrinks
while it is mapped kills its reader (SIGBUS): replace it by renaming.
"""

import bisect
import itertools
import json
import mmap
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from ..lab import files
from ..lab.arguments import has_form
from .reader import KINDS, SUFFIXES, Reader, Sample, checked, pack

ROW = np.dtype([("offset", "<i8"), ("size", "<i8"), ("label", "<i8"), ("crc32", "<u4"), ("key_bytes", "<u4")])
READ = 1 << 20  # bytes of a read in order
MAPPED, PAGE = "samples.mapped", 4096
AHEAD = 4 << 20  # bytes
WILLNEED = getattr(mmap, "MADV_WILLNEED", None)


class Table(NamedTuple):
    about: dict  # `kind`, `bytes` of all data, and what a format adds
    rows: np.ndarray  # (N,) of ROW
    keys: bytes


def packed(about: dict, entries: list[tuple[int, int, int, int, bytes]]) -> bytes:
    """The table of offset, size, label, crc32 and key of each sample."""
    rows = np.array([(*numbers, len(key)) for *numbers, key in entries], ROW)
    keys = b"".join(key for *_, key in entries)
    return json.dumps(about | {"samples": len(rows), "keys": len(keys)}).encode() + b"\n" + rows.tobytes() + keys


def read_table(stream: BinaryIO) -> Table:
    about = json.loads(stream.readline())
    rows = np.frombuffer(stream.read(about["samples"] * ROW.itemsize), ROW, about["samples"])
    return Table(about, rows, stream.read(about["keys"]))


class Keys(Sequence):
    """The keys of tables one after the other; the text of one is made when it is asked for."""

    def __init__(self, tables: list[Table]) -> None:
        self.text = b"".join(table.keys for table in tables)
        self.ends = np.cumsum(np.concatenate([[0], *(table.rows["key_bytes"] for table in tables)]))  # (N + 1,)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, position: int) -> str:
        position = range(len(self))[position]
        return self.text[self.ends[position] : self.ends[position + 1]].decode()


def write_tar(samples: Iterable[Sample], folder: str | Path, kind: str, *, per_shard: int = 1000) -> None:
    """Write shards of `per_shard` samples, then read each again for its index. The folder is complete or absent."""
    import webdataset

    with files.building(Path(folder).absolute()) as part:  # webdataset would run a relative path `pipe:…` as a command
        pattern = str(part).replace("%", "%%") + "/%05d.tar"
        with webdataset.ShardWriter(pattern, maxcount=per_shard, maxsize=2**62, verbose=0, mtime=0) as writer:
            for position, (key, label, data) in enumerate(checked(samples, kind)):
                members = {SUFFIXES[kind]: pack(kind, data), "json": {"key": key, "label": label}}
                writer.write({"__key__": f"{position:08d}"} | members)
        Tar(part)


class Tar(Reader):
    """Sample i is the i-th of all shards in order. Indexes are read at opening, about 1 µs a sample, or made there.

    Files are opened at the first read and stay open. `pread` uses no shared file position, so forked workers use their
    parent's descriptors; spawned workers open their own (`pickle` omits descriptors).
    """

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        self._opened: dict[str, int] = {}  # file -> its descriptor
        super().__init__(folder, verify=verify)

    def _open(self) -> None:
        shards = sorted(self.folder.glob("*.tar"))
        if not shards:
            raise ValueError("no shards 00000.tar, …")
        tables = [_index_of(shard) for shard in shards]
        rows = np.concatenate([table.rows for table in tables])  # (N,)
        self.files, self.kind, self.keys = list(map(str, shards)), tables[0].about["kind"], Keys(tables)
        self.offsets, self.sizes, self.labels, self.sums = (rows[name] for name in ("offset", "size", "label", "crc32"))
        self.starts = np.cumsum([0, *(len(table.rows) for table in tables)]).tolist()
        self.shards = [range(a, b) for a, b in itertools.pairwise(self.starts)]

    def file_of(self, position: int) -> str:
        return self.files[bisect.bisect_right(self.starts, position) - 1]

    def read(self, position: int) -> Sample:
        raw = self._pread(self.file_of(position), int(self.offsets[position]), int(self.sizes[position]))
        return self._sample(position, raw)

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
                yield self._sample(position, block[low:high])
            at = stop

    def _pread(self, file: str, offset: int, size: int) -> bytes:
        if file not in self._opened:
            self._opened[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        raw = os.pread(self._opened[file], size, offset)
        if len(raw) != size:
            raise ValueError(f"truncated: {len(raw)} of {size} bytes at {offset} are there")
        return raw

    def close(self) -> None:
        for descriptor in self._opened.values():
            os.close(descriptor)
        self._opened.clear()

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict:
        return vars(self) | {"_opened": {}}


def _index_of(shard: Path) -> Table:
    """A shard's table, made at the first time: that reads the shard once."""
    index = shard.with_suffix(".index")
    if not index.is_file():
        entries: dict[str, dict[str, tuple]] = {}  # a sample's name, up to the first dot -> its members by suffix
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                name, _, suffix = member.name.partition(".")
                data = tar.extractfile(member).read()
                text = data if suffix == "json" else b""
                entries.setdefault(name, {})[suffix] = member.offset_data, len(data), zlib.crc32(data), text
        (suffix,) = next(iter(entries.values()), {}).keys() - {"json"}
        samples = [_entry(members, suffix) for members in entries.values()]
        files.write(index, packed({"kind": KINDS[suffix]}, samples))
    with open(index, "rb") as stream:
        return read_table(stream)


def _entry(members: dict[str, tuple], suffix: str) -> tuple[int, int, int, int, bytes]:
    (offset, size, crc32, _), about = members[suffix], json.loads(members["json"][-1])
    if not has_form(about, {"key": str, "label": None}) or about["label"] not in range(-(2**63), 2**63):
        raise ValueError("a sample's json isn't a key and a label")
    return offset, size, about["label"], crc32, about["key"].encode()


def write_mapped(samples: Iterable[Sample], folder: str | Path, kind: str) -> None:
    """Write the file. The folder is complete or absent."""
    entries, end, dtype = [], 0, ""
    with files.building(folder) as part, tempfile.TemporaryFile(dir=part) as payload:
        for key, label, data in checked(samples, kind):
            dtype = data.dtype.str[1:]
            payload.write(data)
            entries.append((end, data.nbytes, label, zlib.crc32(data), key.encode()))
            end += data.nbytes
        head = packed({"kind": kind, "dtype": dtype, "bytes": end}, entries)
        payload.seek(0)
        with open(part / MAPPED, "wb") as stream:
            stream.write(head.ljust(_page_end(len(head)), b"\0"))
            shutil.copyfileobj(payload, stream, 1 << 20)
            stream.flush()
            os.fsync(stream.fileno())  # before the rename: a crash can't leave an incomplete file under the name


class Mapped(Reader):
    """Sample i is a slice of the file, which is mapped at the first access, in each process."""

    _map: mmap.mmap | None = None

    def _open(self) -> None:
        self.file = str(self.folder / MAPPED)
        with open(self.file, "rb") as stream:
            self.file_bytes = os.fstat(stream.fileno()).st_size
            table = read_table(stream)
            start = _page_end(stream.tell())
        if self.file_bytes != (expected := start + table.about["bytes"]):
            raise ValueError(f"truncated or changed: {MAPPED} has {self.file_bytes} bytes of {expected}")
        self.kind, self.dtype = table.about["kind"], np.dtype("<" + table.about["dtype"])
        self.offsets, self.sizes = table.rows["offset"] + start, table.rows["size"]  # within the file
        self.labels, self.sums, self.keys = table.rows["label"], table.rows["crc32"], Keys([table])
        self.shards = [range(len(table.rows))]

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


def _page_end(size: int) -> int:
    """The first multiple of `PAGE` at or after a size."""
    return -(-size // PAGE) * PAGE
