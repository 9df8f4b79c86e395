"""A table of samples: where each one's data lies, its label, checksum and key. The index of a tar shard is such a table
in a file of its own; a mapped file begins with one.

    byte 0      magic, version u32, crc32 u32 and size u64 of what follows; little-endian, see `HEAD`
    then        a line of JSON; N rows of `ROW`; the keys in UTF-8, one after the other

Reading a table costs one read and one checksum, in memory 32 bytes a sample and its key.
"""

import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

MAGIC = b"\x93TABLE\r\n"  # not valid text; a conversion of line ends would change it
VERSION = 1
HEAD = struct.Struct("<8sIIQ")
ROW = np.dtype([("offset", "<i8"), ("size", "<i8"), ("label", "<i8"), ("crc32", "<u4"), ("key_bytes", "<u4")])


class Table(NamedTuple):
    about: dict  # `kind`, `bytes` (of the data that `rows` locate) and what a format adds
    rows: np.ndarray  # (N,) of ROW
    keys: bytes


def pack(about: dict, entries: list[tuple[int, int, int, int, bytes]]) -> bytes:
    """The table of offset, size, label, crc32 and key of each sample."""
    rows = np.array([(*numbers, len(key)) for *numbers, key in entries], ROW)
    head = json.dumps(about | {"samples": len(entries)}).encode()
    body = head + b"\n" + rows.tobytes() + b"".join(key for *_, key in entries)
    return HEAD.pack(MAGIC, VERSION, zlib.crc32(body), len(body)) + body


def read(stream: BinaryIO, file_bytes: int) -> Table:
    """The table at a file's beginning; a ValueError if it is damaged. Takes no more memory than the file has bytes."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size or not head.startswith(MAGIC):
        raise ValueError(f"truncated, or wrong magic number: it begins with {head[: len(MAGIC)]!r}, expected {MAGIC!r}")
    _, version, crc32, size = HEAD.unpack(head)
    if version != VERSION:
        raise ValueError(f"version {version}; this reads version {VERSION}")
    if HEAD.size + size > file_bytes:
        raise ValueError(f"truncated or damaged: its table has {size} bytes, the file {file_bytes}")
    body = stream.read(size)
    if zlib.crc32(body) != crc32:
        raise ValueError("its table is damaged: the crc32 of it is another")
    line, _, body = body.partition(b"\n")
    about = json.loads(line)
    rows = np.frombuffer(body, ROW, about["samples"])
    return Table(about, rows, body[rows.nbytes :])


class Keys(Sequence):
    """The keys of tables one after the other; the text of one is made when it is asked for."""

    def __init__(self, tables: Iterable[Table]) -> None:
        tables = list(tables)
        self.text = b"".join(table.keys for table in tables)
        self.ends = np.cumsum(np.concatenate([[0], *(table.rows["key_bytes"] for table in tables)]))  # (N + 1,)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, position: int) -> str:
        position = range(len(self))[position]
        return self.text[self.ends[position] : self.ends[position + 1]].decode()
