"""What formats have in common: samples (key, label, 1-D array), the base class of readers, the error for damaged data.

An image is the content of its JPEG file as uint8, not pixels: no format decodes. Tokens are integers. All arrays of a
data set have one dtype. No sample is dropped silently: each position gives its sample or a `FormatError`.
"""

import functools
import io
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset

from ..lab.arguments import check_choice

SUFFIXES = {"image": "jpg", "tokens": "npy"}  # kind -> suffix of a sample's file
KINDS = {suffix: kind for kind, suffix in SUFFIXES.items()}


class Sample(NamedTuple):
    key: str
    label: int
    data: np.ndarray  # (n,) uint8 or integers; treat it as read-only, for it may lie in a mapped file


class FormatError(ValueError):
    """Damaged data: the message has file, sample and reason."""


class Reader(Dataset):
    """An open data set. Files are opened at the first read, again in each process where needed.

    `verify` compares each sample's checksum when it is read, which detects flipped bits.

    Each format is a subclass: `_open()` sets the attributes below, `read(position)` returns a sample, `in_order` those
    of a shard, if that is faster, and `file_of(position)` names the file that has its data. What they raise is made a
    `FormatError` here. Instances must support `pickle` and `fork`.
    """

    kind: str
    labels: np.ndarray  # (N,) int64
    sums: np.ndarray  # (N,) uint32: crc32 of each sample's bytes
    keys: Sequence[str]
    shards: list[range]  # positions that are read in order; together all of them

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        self.folder, self.verify = Path(folder).absolute(), verify
        try:
            self._open()
        except (OSError, LookupError, ValueError, TypeError, AttributeError, tarfile.TarError) as error:
            raise FormatError(f"{self.folder}: {error}") from error

    def in_order(self, piece: range) -> Iterator[Sample]:
        return map(self.read, piece)

    def close(self) -> None:
        """Close files; reading opens them again."""

    def find(self, label: int) -> np.ndarray:
        """The positions with a label, ascending: one pass over `labels`."""
        return np.flatnonzero(self.labels == label)

    def stream(self) -> Iterator[Sample]:
        """All samples in order."""
        for piece in self.shards:
            position = piece.start
            try:
                for sample in self.in_order(piece):
                    yield sample
                    position += 1
            except (OSError, ValueError) as error:
                raise self._damaged(position, error) from error

    def __len__(self) -> int:
        return self.shards[-1].stop

    def __getitem__(self, position: int) -> Sample:
        position = range(len(self))[position]
        try:
            return self.read(position)
        except (OSError, ValueError) as error:
            raise self._damaged(position, error) from error

    def _damaged(self, position: int, error: Exception) -> FormatError:
        return FormatError(f"{self.file_of(position)}, sample {position}: {error}")

    def _sample(self, position: int, raw: bytes | memoryview | np.ndarray) -> Sample:
        """The sample at a position, whose file or slice has these bytes."""
        if self.verify and zlib.crc32(raw) != self.sums[position]:
            raise ValueError("its crc32 is another than when it was written: the content changed")
        return Sample(self.keys[position], int(self.labels[position]), unpack(self.kind, raw))


def checked(samples: Iterable[Sample], kind: str) -> Iterator[Sample]:
    """The samples as every format can keep them, or a ValueError that names the first that cannot be kept."""
    check_choice(SUFFIXES, kind=kind)
    dtype = None
    for position, (key, label, data) in enumerate(samples):
        data = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.asarray(data)
        dtype = dtype or data.dtype
        fits = dtype == np.uint8 if kind == "image" else dtype.kind in "iu" and np.can_cast(dtype, np.int64)
        if data.ndim != 1 or data.dtype != dtype or not fits:
            valid = "bytes" if kind == "image" else "integers of one type that int64 holds"
            raise ValueError(f"sample {position} is {data.dtype} {data.shape}; {kind} samples are 1-D, of {valid}")
        yield Sample(key, int(label), np.ascontiguousarray(data, data.dtype.newbyteorder("<")))
    if dtype is None:
        raise ValueError("no samples; a data set has at least one")


def pack(kind: str, data: np.ndarray) -> bytes:
    """The content of a sample's file: an image's bytes unchanged, tokens as .npy (128 bytes of header)."""
    if kind == "image":
        return data.tobytes()
    stream = io.BytesIO()
    np.lib.format.write_array(stream, data, allow_pickle=False)
    return stream.getvalue()


def unpack(kind: str, raw: bytes | memoryview | np.ndarray) -> np.ndarray:
    """The inverse of `pack`, without a copy; an array is given back."""
    if isinstance(raw, np.ndarray):
        return raw
    if kind == "image":
        return np.frombuffer(raw, np.uint8)
    start = 10 + int.from_bytes(raw[8:10], "little")  # of a .npy file of version 1.0
    dtype, count = _npy_header(bytes(raw[:start]))
    return np.frombuffer(raw, dtype, count, start)


@functools.lru_cache(maxsize=4096)  # numpy parses a header in 20 µs
def _npy_header(raw: bytes) -> tuple[np.dtype, int]:
    stream = io.BytesIO(raw)
    try:
        np.lib.format.read_magic(stream)
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    except (SyntaxError, TokenError) as error:  # numpy reads what is no dictionary as Python
        raise ValueError(f"its .npy header is damaged: {error}") from error
    return dtype, shape[0]
