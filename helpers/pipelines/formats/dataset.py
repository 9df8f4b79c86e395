"""What every format writes and reads: samples of a key, a label and a 1-D array, and what is wrong with one.

    reader = mapped.open_(folder, faults="skip", check_image=True)
    reader[3]                                   # Sample(key, label, data), or a Fault
    for item in reader.stream(): ...            # every position in order
    DataLoader(reader, batch_size=64, sampler=Permutation(len(reader)), num_workers=4, collate_fn=collate)

An image is the content of its JPEG file as uint8, not pixels: no format here decodes. Tokens are integers. All arrays
of a data set have one type.

Nothing is lost silently: every position gives exactly one thing, its sample or, with faults="skip", the `Fault` that
says why there is none. With faults="refuse" the first fault is raised.
"""

import contextlib
import io
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset

from helpers.lab.arguments import check_choice

SUFFIXES = {"image": "jpg", "tokens": "npy"}  # kind -> what a file of one sample is called
KINDS = {suffix: kind for kind, suffix in SUFFIXES.items()}
TOKEN_TYPES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4")
POLICIES = ("refuse", "skip")


class Sample(NamedTuple):
    key: str
    label: int
    data: np.ndarray  # (n,) uint8 or integers; treat it as read-only, for it may lie in a mapped file


class Fault(NamedTuple):
    """What is wrong, and where. `sample` is the position in the data set, None if all of the file is meant."""

    file: str
    sample: int | None
    what: str

    def __str__(self) -> str:
        return f"{self.file}{'' if self.sample is None else f', sample {self.sample}'}: {self.what}"


class FormatError(ValueError):
    """Data that is not what its format says. `fault` has file, sample and reason apart.

    It is made of a fault; a DataLoader that passes it on from a worker makes it of a text, and `fault` is None then.
    """

    def __init__(self, fault: Fault | str) -> None:
        super().__init__(str(fault))
        self.fault = fault if isinstance(fault, Fault) else None

    def __reduce__(self):
        return type(self), (self.fault or str(self),)


class Reader(Dataset):
    """A data set that is open. Files are opened when they are first read, in each process anew where that is needed.

    `verify` checks each sample's checksum when it is read, which is what finds a flipped bit; `check_image` decodes it.
    `faults` (the attribute) has what was wrong when the data set was opened, if that is not refused: a shard without
    an index, whose samples are then not counted; one that is shorter than its index says, whose last samples will be
    faults of their own.

    A format is a subclass. Its `_open` fills in the attributes below; its `read` gives a sample. Both may raise OSError
    or ValueError, and need not name the file: that is done here. It must survive `pickle` and `fork`.
    """

    kind: str
    labels: np.ndarray  # (N,) int64
    keys: Sequence[str]
    shards: list[range]  # runs of positions that are cheap to read in order; together all positions, in order

    def __init__(
        self, folder: str | Path, *, faults: str = "refuse", check_image: bool = False, verify: bool = True
    ) -> None:
        check_choice(POLICIES, faults=faults)
        self.folder, self.policy, self.verify, self.check_image = Path(folder), faults, verify, check_image
        self.faults: list[Fault] = []
        self._open()
        if check_image and self.kind != "image":
            raise ValueError(f"check_image is {check_image!r}; the data set has {self.kind}, not images")

    def _open(self) -> None:
        raise NotImplementedError

    def read(self, position: int) -> Sample:
        raise NotImplementedError

    def file_of(self, position: int) -> str:
        """The file that a sample's data lies in."""
        raise NotImplementedError

    def by_library(self, piece: range) -> Iterator[Sample]:
        """The samples of a piece of one shard by the format's own library, where that is the fastest in order.

        May end early, or give none: `stream` reads the rest by position.
        """
        return iter(())

    def close(self) -> None:
        """Let go of open files; reading opens them again."""

    def find(self, label: int) -> np.ndarray:
        """The positions with a label, ascending: one pass over `labels`."""
        return np.flatnonzero(self.labels == label)

    def stream(self, pieces: Iterable[range] | None = None) -> Iterator[Sample | Fault]:
        """What each position of each piece holds, in order; of all shards if none are given.

        A piece that begins where a shard begins is read by the format's own library. Where that fails, the rest of
        the piece is read by position: one broken sample does not cost its shard.
        """
        for piece in self.shards if pieces is None else pieces:
            position = piece.start
            for sample in self.by_library(piece):
                yield self._settled(position, sample)
                position += 1
            for rest in range(position, piece.stop):
                yield self._settled(rest)

    def __len__(self) -> int:
        return self.shards[-1].stop

    def __getitem__(self, position: int) -> Sample | Fault:
        if not -len(self) <= position < len(self):
            raise IndexError(f"sample {position} of a data set of {len(self)} samples")
        return self._settled(int(position) % len(self))

    def _settled(self, position: int, sample: Sample | None = None) -> Sample | Fault:
        """A sample, read unless given, and checked as wanted; or its fault, if that is not to be raised."""
        try:
            sample = self.read(position) if sample is None else sample
            if self.check_image:
                try:
                    decode(sample.data)
                except ValueError as error:
                    raise ValueError(f"{error} (key {sample.key!r})") from error
            return sample
        except (OSError, ValueError) as error:
            fault = Fault(self.file_of(position), position, _reason(error))
            if self.policy == "refuse":
                raise FormatError(fault) from error
            return fault

    def _admit(self, fault: Fault) -> None:
        """Refuse a fault, or put it on record, as the user chose."""
        if self.policy == "refuse":
            raise FormatError(fault)
        self.faults.append(fault)

    def _check(self, data: bytes | np.ndarray, crc32: int) -> None:
        """Compare a sample's content with the checksum that was written with it."""
        if self.verify and zlib.crc32(data) != crc32:
            raise ValueError("its crc32 is another than when it was written: the content changed")


@contextlib.contextmanager
def naming(file: str | Path, what: str = "") -> Iterator[None]:
    """Makes a FormatError that names the file of whatever OSError or ValueError the block raises."""
    try:
        yield
    except FormatError:
        raise
    except (OSError, ValueError) as error:
        said = f"{what} ({_reason(error)})" if what else _reason(error)
        raise FormatError(Fault(str(file), None, said)) from error


def _reason(error: OSError | ValueError) -> str:
    return f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)


def checked(samples: Iterable[Sample], kind: str) -> Iterator[Sample]:
    """The samples as every format can keep them, or a ValueError that names the first that cannot be kept."""
    check_choice(SUFFIXES, kind=kind)
    dtype, position = None, -1
    for position, (key, label, data) in enumerate(samples):
        data = np.frombuffer(data, np.uint8) if isinstance(data, (bytes, bytearray, memoryview)) else np.asarray(data)
        dtype = dtype or data.dtype
        if not isinstance(key, str) or any("\ud800" <= letter <= "\udfff" for letter in key):
            raise ValueError(f"sample {position}: key is {key!r}; it must be a text that UTF-8 can write")
        if isinstance(label, bool) or not -(2**63) <= int(label) < 2**63 or int(label) != label:
            raise ValueError(f"sample {position}: label is {label!r}; it must be a 64-bit integer")
        if data.ndim != 1 or data.dtype != dtype or dtype.str[1:] not in (("u1",) if kind == "image" else TOKEN_TYPES):
            wanted = "bytes" if kind == "image" else f"one of {', '.join(TOKEN_TYPES)}, the same for all samples"
            said = f"data is {data.dtype} {data.shape}; {kind} samples are 1-D, of {wanted}"
            raise ValueError(f"sample {position}: {said}")
        yield Sample(key, int(label), np.ascontiguousarray(data, data.dtype.newbyteorder("<")))
    if position < 0:
        raise ValueError("no samples; a data set has at least one")


@contextlib.contextmanager
def building(folder: str | Path) -> Iterator[Path]:
    """A new folder that takes the name when the block ends well: a data set is whole, or absent.

    Costs a rename. Only a kill leaves the hidden part folder behind; nothing ever reads it.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; a data set is written to a folder that is new or empty")
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        yield part
        os.rename(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def pack(kind: str, data: np.ndarray) -> bytes:
    """What a file of one sample holds: the JPEG's bytes as they are, tokens as .npy (128 bytes more than they are)."""
    if kind == "image":
        return data.tobytes()
    stream = io.BytesIO()
    np.lib.format.write_array(stream, data, allow_pickle=False)
    return stream.getvalue()


def unpack(kind: str, raw: bytes) -> np.ndarray:
    """Undoes `pack`: no copy for an image; for tokens numpy parses the header, which costs about 20 µs."""
    if kind == "image":
        return np.frombuffer(raw, np.uint8)
    return np.lib.format.read_array(io.BytesIO(raw), allow_pickle=False)


def decode(data: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8 of an image file's content. Raises ValueError whatever is wrong with it."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except Exception as error:  # a decoder that is given nonsense raises anything: struct.error, SyntaxError, …
        said = str(error) if isinstance(error, OSError) and len(data) and "BytesIO" not in str(error) else ""
        raise ValueError(f"not a readable image ({said or f'{len(data)} bytes of no known kind'})") from error
