"""One memory-mapped file: a header, tables, and the samples' data one after the other. Ours.

    byte 0      magic b"\\x93MAPPED\\n", then the header, little-endian, see `HEADER`; its own crc32 is its last 4 bytes
    then        offsets (N + 1) u64, labels (N) i64, key offsets (N + 1) u64, crc32 (N) u32, keys in UTF-8
    payload_at  a multiple of 4,096: the data. Sample i is its bytes offsets[i] to offsets[i + 1]

A sample's data is a slice of the mapped file: no copy and no system call; the kernel brings in the pages that are
touched, and all processes of a machine share them. Data of one type begins at a multiple of that type's size, so tokens
need no copy to be aligned. The tables come first, so that of a truncated file the samples that are there can be read,
and the others named. They are read into memory at opening, 28 bytes a sample and its key.

On disk: 28 bytes a sample, its key, its data. Writing costs the data twice, for the tables' size is known last. To
change a sample is to write the file again. A file that shrinks while it is mapped kills its reader (SIGBUS), as with
any mapped file: replace one by renaming.
"""

import mmap
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .reader import Reader
from .sample import SUFFIXES, TOKEN_TYPES, Fault, FormatError, Sample, admit, building, checked

NAME = "samples.mapped"
MAGIC = b"\x93MAPPED\n"  # not text, and changed by whatever mends line ends
VERSION = 1
PAGE = 4096
# magic, version, kind, type, N, bytes of keys, where the data begins, bytes of the file, crc32 of tables, of header
HEADER = struct.Struct("<8sI8s4sQQQQII")


def obstacle() -> str:
    return ""


def write(samples: Iterable[Sample], folder: str | Path, kind: str) -> None:
    """Write the file. It takes its name when it is whole."""
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
            os.fsync(stream.fileno())  # else a crash could leave the name on a file that isn't all there


def open_(folder: str | Path, *, faults: str = "refuse", check_image: bool = False, verify: bool = True) -> Reader:
    """Reads header and tables. `verify` checks every sample's crc32 when it is read, which touches all of it.

    What is wrong with header or tables is refused whatever `faults` says: nothing could be read without them.
    """
    return Reader(Mapped(Path(folder) / NAME, faults, verify), faults, check_image)


class Header(NamedTuple):
    """The header, checked."""

    kind: str
    dtype: np.dtype
    count: int
    key_bytes: int
    start: int
    bytes: int
    tables_crc: int


class Mapped:
    """Sample i is a slice of the file, which is mapped when data is first touched, in each process."""

    def __init__(self, file: Path, policy: str, verify: bool) -> None:
        self.file, self.verify, self.faults = str(file), verify, []
        self._map: mmap.mmap | None = None
        try:
            with open(file, "rb") as stream:
                self.there = os.fstat(stream.fileno()).st_size
                header = _header(stream.read(HEADER.size))
                tables = stream.read(28 * header.count + 16 + header.key_bytes) if self.there >= header.start else b""
        except OSError as error:
            raise FormatError(Fault(self.file, None, f"cannot be read ({error.strerror})")) from error
        except ValueError as error:
            raise FormatError(Fault(self.file, None, str(error))) from error
        if self.there != header.bytes:
            fault = Fault(self.file, None, f"truncated or changed: it has {self.there} bytes of {header.bytes}")
            admit(fault, policy if tables else "refuse", self.faults)
        if zlib.crc32(tables) != header.tables_crc:
            raise FormatError(
                Fault(self.file, None, "its tables are damaged: their crc32 is another than the header's")
            )
        count = header.count
        offsets, self.labels, ends, self.sums = (
            np.frombuffer(tables, form, size, offset=at)
            for form, size, at in (
                ("<u8", count + 1, 0),
                ("<i8", count, 8 * count + 8),
                ("<u8", count + 1, 16 * count + 8),
                ("<u4", count, 24 * count + 16),
            )
        )
        self.offsets = offsets.astype(np.int64) + header.start  # within the file
        blob = tables[28 * count + 16 :]
        self.keys = [blob[low:high].decode() for low, high in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
        self.kind, self.dtype = header.kind, header.dtype
        self.shards = [range(count)]

    def file_of(self, place: int) -> str:
        return self.file

    def read(self, place: int) -> Sample:
        low, high = int(self.offsets[place]), int(self.offsets[place + 1])
        if high > self.there:
            raise FormatError(Fault(self.file, place, f"truncated: it ends at {self.there}, the sample at byte {high}"))
        if self._map is None:
            self._open()
        count = (high - low) // self.dtype.itemsize
        data = np.frombuffer(self._map, self.dtype, count, low) if count else np.empty(0, self.dtype)
        if self.verify and zlib.crc32(data) != self.sums[place]:
            raise FormatError(Fault(self.file, place, "its crc32 is another than the table's: the content changed"))
        return Sample(self.keys[place], int(self.labels[place]), data)

    def _open(self) -> None:
        try:
            with open(self.file, "rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise FormatError(Fault(self.file, None, f"cannot be mapped ({error})")) from error
        if len(self._map) != self.there:
            raise FormatError(Fault(self.file, None, "is another than when it was opened: its size changed"))

    def run(self, piece: range) -> Iterator[Sample]:
        return iter(())  # one by one is the fastest way in any order

    def close(self) -> None:
        self._map = None  # unmapped when the last sample that is a slice of it is gone

    def __getstate__(self) -> dict:
        return vars(self) | {"_map": None}


def _header(raw: bytes) -> Header:
    if raw[: len(MAGIC)] != MAGIC:
        raise ValueError(f"wrong magic number: it begins with {raw[: len(MAGIC)]!r}, expected {MAGIC!r}")
    if len(raw) < HEADER.size:
        raise ValueError(f"truncated: {len(raw)} bytes of its header of {HEADER.size} are there")
    _, version, kind, dtype, count, key_bytes, start, size, tables_crc, own_crc = HEADER.unpack(raw)
    if zlib.crc32(raw[:-4]) != own_crc:
        raise ValueError("its header is damaged: the crc32 of it is another")
    if version != VERSION:
        raise ValueError(f"version {version}; this reads version {VERSION}")
    kind, dtype = kind.rstrip(b"\0").decode(), dtype.rstrip(b"\0").decode()
    if kind not in SUFFIXES or dtype not in TOKEN_TYPES:
        raise ValueError(
            f"has {kind!r} of type {dtype!r}; expected {' or '.join(SUFFIXES)} of {', '.join(TOKEN_TYPES)}"
        )
    return Header(kind, np.dtype("<" + dtype), count, key_bytes, start, size, tables_crc)
