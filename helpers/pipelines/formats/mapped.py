"""Our memory-mapped format, one file: a header, tables, and the samples' data one after the other.

    byte 0      magic b"\\x93MAPPED\\n", then the header, little-endian, see `HEADER`; its own crc32 is its last 4 bytes
    then        offsets (N + 1) u64, labels (N) i64, key offsets (N + 1) u64, crc32 (N) u32, keys in UTF-8
    payload_at  a multiple of 4,096: the data. Sample i is its bytes offsets[i] to offsets[i + 1]

A sample's data is a slice of the mapped file: no copy and no system call; the kernel loads pages on access, and all
processes of a machine share them. Offsets are multiples of the dtype's size, so tokens are aligned without a copy. The
tables come first, so that a truncated file's remaining samples can be read, and the missing ones named. They are read
into memory at opening, 28 bytes a sample and its key.

On disk a sample takes 28 bytes, its key and its data. Data is written twice, as the tables' size is known last.
Changing a sample means writing the file again. A file that shrinks while it is mapped kills its reader (SIGBUS), as any
mapped file does: replace it by renaming.
"""

import mmap
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from .dataset import SUFFIXES, TOKEN_TYPES, Fault, FormatError, Keys, Reader, Sample, building, checked, naming

NEEDS = ()
NAME = "samples.mapped"
MAGIC = b"\x93MAPPED\n"  # not valid text; a conversion of line ends would change it
VERSION = 1
PAGE = 4096
AHEAD = 4 << 20  # bytes
WILLNEED = getattr(mmap, "MADV_WILLNEED", None)
# magic, version, kind, type, N, bytes of keys, where the data begins, bytes of the file, crc32 of tables, of header
HEADER = struct.Struct("<8sI8s4sQQQQII")


def write(samples: Iterable[Sample], folder: str | Path, kind: str) -> None:
    """Write the file. The folder is complete or absent."""
    offsets, labels, sums, keys, dtype = [0], [], [], [], ""
    with building(folder) as part, tempfile.TemporaryFile(dir=part) as payload:
        for sample in checked(samples, kind):
            dtype = sample.data.dtype.str[1:]
            payload.write(sample.data)
            offsets.append(offsets[-1] + sample.data.nbytes)
            labels.append(sample.label)
            sums.append(zlib.crc32(sample.data))
            keys.append(sample.key.encode())
        ends = np.cumsum([0, *map(len, keys)])
        columns = ((offsets, "<u8"), (labels, "<i8"), (ends, "<u8"), (sums, "<u4"))
        tables = b"".join(np.array(column, form).tobytes() for column, form in columns) + b"".join(keys)
        start = -(-(HEADER.size + len(tables)) // PAGE) * PAGE
        sizes = (len(labels), int(ends[-1]), start, start + offsets[-1])
        header = HEADER.pack(MAGIC, VERSION, kind.encode(), dtype.encode(), *sizes, zlib.crc32(tables), 0)[:-4]
        payload.seek(0)
        with open(part / NAME, "wb") as stream:
            stream.write(header + struct.pack("<I", zlib.crc32(header)) + tables)
            stream.write(bytes(start - stream.tell()))
            shutil.copyfileobj(payload, stream, 1 << 20)
            stream.flush()
            os.fsync(
                stream.fileno()
            )  # before the rename, so that a crash can't leave an incomplete file under the name


class OneFile(Reader):
    """A format of one file, whose samples are slices of it: mapped at the first access, in each process."""

    name: str  # of the file, in its folder
    file_bytes: int  # when it was opened
    _map: mmap.mmap | None = None

    @property
    def file(self) -> str:
        return str(self.folder / self.name)

    def file_of(self, position: int) -> str:
        return self.file

    def close(self) -> None:
        self._map = None  # unmapped when the last slice of it is freed

    def __getstate__(self) -> dict:
        return vars(self) | {"_map": None}

    def _check_size(self, expected: int) -> None:
        if self.file_bytes != expected:
            self._raise_or_record(
                Fault(self.file, None, f"truncated or changed: it has {self.file_bytes} bytes of {expected}")
            )

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            with open(self.file, "rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            if len(self._map) != self.file_bytes:
                self._map = None
                raise ValueError("is another than when it was opened: its size changed")
        return self._map

    def _slice(self, start: int, size: int, dtype: np.dtype) -> np.ndarray:
        """Bytes of the file as an array, without a copy."""
        if start + size > self.file_bytes:
            raise ValueError(f"truncated: the file ends at {self.file_bytes}, the sample at byte {start + size}")
        return np.frombuffer(self._mapped(), dtype, size // dtype.itemsize, start) if size else np.empty(0, dtype)

    def _read_ahead(self, start: int, stop: int) -> None:
        """Let the kernel read a part of the file, where the system can, without waiting for it."""
        start, stop = start - start % mmap.PAGESIZE, min(stop, self.file_bytes)
        if WILLNEED is not None and start < stop:
            self._mapped().madvise(WILLNEED, start, stop - start)


class Mapped(OneFile):
    """Sample i is a slice of the file. Damaged headers or tables always raise, for any `faults`."""

    name = NAME

    def _open(self) -> None:
        with naming(self.file), open(self.file, "rb") as stream:
            self.file_bytes = os.fstat(stream.fileno()).st_size
            count, key_bytes, start, size, tables_crc = self._read_header(stream.read(HEADER.size))
            tables_bytes = 28 * count + 16 + key_bytes
            if HEADER.size + tables_bytes > start:
                raise ValueError(
                    f"tables of {count} samples, {tables_bytes} bytes, do not end before the data at {start}"
                )
            tables = stream.read(tables_bytes) if self.file_bytes >= start else b""
            if not tables:
                raise ValueError(f"truncated or changed: it has {self.file_bytes} bytes of {size}")
            if zlib.crc32(tables) != tables_crc:
                raise ValueError("its tables are damaged: their crc32 is another than the header's")
        self._check_size(size)
        offsets, self.labels, ends, self.sums = (
            np.frombuffer(tables, form, rows, offset=at)
            for form, rows, at in (
                ("<u8", count + 1, 0),
                ("<i8", count, 8 * count + 8),
                ("<u8", count + 1, 16 * count + 8),
                ("<u4", count, 24 * count + 16),
            )
        )
        self.offsets = offsets.astype(np.int64) + start  # (N + 1,), within the file
        if self.offsets[0] < start or (np.diff(self.offsets) < 0).any():
            raise FormatError(Fault(self.file, None, "its samples overlap, or lie outside of its data"))
        self.keys = Keys(tables[28 * count + 16 :], ends.astype(np.int64))
        self.shards = [range(count)]

    def _read_header(self, raw: bytes) -> tuple[int, ...]:
        """Sets kind and dtype; returns N, bytes of keys, the data's offset, bytes of the file, the tables' crc32."""
        if raw[: len(MAGIC)] != MAGIC:
            raise ValueError(f"wrong magic number: it begins with {raw[: len(MAGIC)]!r}, expected {MAGIC!r}")
        if len(raw) < HEADER.size:
            raise ValueError(f"truncated: {len(raw)} bytes of its header of {HEADER.size} are there")
        _, version, kind, dtype, *sizes, header_crc = HEADER.unpack(raw)
        if zlib.crc32(raw[:-4]) != header_crc:
            raise ValueError("its header is damaged: the crc32 of it is another")
        if version != VERSION:
            raise ValueError(f"version {version}; this reads version {VERSION}")
        self.kind, dtype = kind.rstrip(b"\0").decode(), dtype.rstrip(b"\0").decode()
        if self.kind not in SUFFIXES or dtype not in TOKEN_TYPES:
            expected = f"{' or '.join(SUFFIXES)} of {', '.join(TOKEN_TYPES)}"
            raise ValueError(f"has {self.kind!r} of type {dtype!r}; expected {expected}")
        self.dtype = np.dtype("<" + dtype)
        return tuple(sizes)

    def in_order(self, piece: range) -> Iterator[Sample]:
        """The samples of a piece; the kernel reads the next `AHEAD` bytes meanwhile."""
        at = piece.start
        while at < piece.stop:
            start = int(self.offsets[at])
            stop = int(np.searchsorted(self.offsets, start + AHEAD, side="right")) - 1
            stop = min(max(stop, at + 1), piece.stop)
            self._read_ahead(start, start + 2 * AHEAD)
            for position in range(at, stop):
                yield self._sample(position)
            at = stop

    def read(self, position: int) -> Sample:
        # One read of the sample's pages alone: a fault would read up to some MiB around its page.
        self._read_ahead(*self.offsets[position : position + 2].tolist())
        return self._sample(position)

    def _sample(self, position: int) -> Sample:
        start, end = self.offsets[position : position + 2].tolist()
        data = self._slice(start, end - start, self.dtype)
        self._check(data, self.sums[position])
        return Sample(self.keys[position], int(self.labels[position]), data)


open_ = Mapped
