"""The interface of all formats: samples (key, label, 1-D array), the error for damaged data, the base class of readers.

    reader = mapped.open_(folder)
    reader[3]                                   # Sample(key, label, data)
    for sample in reader.stream(): ...          # every position in order
    DataLoader(reader, batch_size=64, shuffle=True, num_workers=4, collate_fn=collate)

An image is the content of its JPEG file as uint8, not pixels: no format decodes. Tokens are integers. All arrays
of a data set have one dtype.

No sample is dropped silently: each position gives its sample or raises a `FormatError` with the reason.
"""

import contextlib
import functools
import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset

from ...lab.arguments import check_choice

SUFFIXES = {"image": "jpg", "tokens": "npy"}  # kind -> suffix of a sample's file
KINDS = {suffix: kind for kind, suffix in SUFFIXES.items()}
TOKEN_TYPES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4")


class Sample(NamedTuple):
    key: str
    label: int
    data: np.ndarray  # (n,) uint8 or integers; treat it as read-only, for it may lie in a mapped file


class FormatError(ValueError):
    """Damaged data: the message has file, sample and reason."""


class Reader(Dataset):
    """An open data set. Files are opened at the first read, again in each process where needed.

    `verify` checks each sample's checksum when it is read, which detects flipped bits.

    Each format is a subclass: `_open()` sets the attributes below, `read(position)` returns a sample, and
    `file_of(position)` names the file that has its data. `_open` and `read` may raise OSError or ValueError; this class
    adds the names of file and sample. Instances must support `pickle` and `fork`.
    """

    kind: str
    labels: np.ndarray  # (N,) int64
    sums: np.ndarray  # (N,) uint32: crc32 of each sample's bytes
    keys: Sequence[str]
    shards: list[range]  # runs of positions that are cheap to read in order; together all positions, in order

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        self.folder, self.verify = Path(folder).absolute(), verify
        self._open()

    def in_order(self, piece: range) -> Iterator[Sample]:
        """The samples of a piece of one shard, if they are read faster in order than by position.

        May end early, or be empty: `stream` reads the rest by position.
        """
        return iter(())

    def close(self) -> None:
        """Close files; reading opens them again."""

    def find(self, label: int) -> np.ndarray:
        """The positions with a label, ascending: one pass over `labels`."""
        return np.flatnonzero(self.labels == label)

    def stream(self, pieces: Iterable[range] | None = None) -> Iterator[Sample]:
        """The sample of each position of each piece, in order; by default of all shards.

        Where `in_order` fails, the rest of the piece is read by position, which names what is damaged.
        """
        for piece in self.shards if pieces is None else pieces:
            position = piece.start
            with contextlib.suppress(OSError, ValueError):
                for sample in self.in_order(piece):
                    yield sample
                    position += 1
            yield from map(self.__getitem__, range(position, piece.stop))

    def __len__(self) -> int:
        return self.shards[-1].stop

    def __getitem__(self, position: int) -> Sample:
        position = range(len(self))[position]
        try:
            return self.read(position)
        except (OSError, ValueError) as error:
            raise unreadable(f"{self.file_of(position)}, sample {position}", error) from error

    def _sample(self, position: int, raw: bytes | np.ndarray) -> Sample:
        """The sample at a position, whose file or slice has these bytes; its checksum is compared if `verify`."""
        if self.verify and zlib.crc32(raw) != self.sums[position]:
            raise ValueError("its crc32 is another than when it was written: the content changed")
        return Sample(self.keys[position], int(self.labels[position]), unpack(self.kind, raw))


@contextlib.contextmanager
def naming(place: str | Path) -> Iterator[None]:
    """A context that turns OSError and ValueError into a FormatError that names the place."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise unreadable(place, error) from error


def unreadable(place: str | Path, error: OSError | ValueError) -> FormatError:
    reason = f"cannot be read ({error.strerror or error})" if isinstance(error, OSError) else error
    return FormatError(f"{place}: {reason}")


def checked(samples: Iterable[Sample], kind: str) -> Iterator[Sample]:
    """The samples as every format can keep them, or a ValueError that names the first that cannot be kept."""
    check_choice(SUFFIXES, kind=kind)
    dtype, position = None, -1
    for position, (key, label, data) in enumerate(samples):
        data = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.asarray(data)
        dtype = dtype or data.dtype
        if data.ndim != 1 or data.dtype != dtype or dtype.str[1:] not in (("u1",) if kind == "image" else TOKEN_TYPES):
            valid = "bytes" if kind == "image" else f"one of {', '.join(TOKEN_TYPES)}, the same for all samples"
            reason = f"data is {data.dtype} {data.shape}; {kind} samples are 1-D, of {valid}"
            raise ValueError(f"sample {position}: {reason}")
        yield Sample(key, int(label), np.ascontiguousarray(data, data.dtype.newbyteorder("<")))
    if position < 0:
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
    np.lib.format.read_magic(stream)
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    return dtype, shape[0]
