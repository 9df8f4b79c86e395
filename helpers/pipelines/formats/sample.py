"""What every format keeps: samples of a key, a label and a 1-D array; and how what is wrong with one is said.

An image is the content of its JPEG file as uint8, not pixels: no format here decodes. Tokens are integers. All arrays
of a data set have one type.
"""

import contextlib
import io
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

SUFFIXES = {"image": "jpg", "tokens": "npy"}  # kind -> what a file of one sample is called
TOKEN_TYPES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4")
POLICIES = ("refuse", "skip")


class Sample(NamedTuple):
    key: str
    label: int
    data: np.ndarray  # (n,) uint8 or integers; treat it as read-only, for it may lie in a mapped file


class Fault(NamedTuple):
    """What is wrong, and where. `sample` is the place in the data set, None if all of the file is meant."""

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


def admit(fault: Fault, policy: str, kept: list[Fault]) -> None:
    """Refuse a fault, or keep it on record, as the user chose."""
    if policy == "refuse":
        raise FormatError(fault)
    kept.append(fault)


def allowed(name: str, value: object, choices: Iterable[object]) -> None:
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, choices))}")


def checked(samples: Iterable[Sample], kind: str) -> Iterator[Sample]:
    """The samples as every format can keep them, or a ValueError that names the first that cannot be kept."""
    allowed("kind", kind, SUFFIXES)
    dtype, place = None, -1
    for place, (key, label, data) in enumerate(samples):
        data = np.frombuffer(data, np.uint8) if isinstance(data, (bytes, bytearray, memoryview)) else np.asarray(data)
        dtype = dtype or data.dtype
        if not isinstance(key, str) or any("\ud800" <= letter <= "\udfff" for letter in key):
            raise ValueError(f"sample {place}: key is {key!r}; it must be a text that UTF-8 can write")
        if isinstance(label, bool) or not -(2**63) <= int(label) < 2**63 or int(label) != label:
            raise ValueError(f"sample {place}: label is {label!r}; it must be a 64-bit integer")
        if data.ndim != 1 or data.dtype != dtype or dtype.str[1:] not in (("u1",) if kind == "image" else TOKEN_TYPES):
            wanted = "bytes" if kind == "image" else f"one of {', '.join(TOKEN_TYPES)}, the same for all samples"
            raise ValueError(f"sample {place}: data is {data.dtype} {data.shape}; {kind} samples are 1-D, of {wanted}")
        yield Sample(key, int(label), np.ascontiguousarray(data, data.dtype.newbyteorder("<")))
    if place < 0:
        raise ValueError("no samples; a data set has at least one")


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


@contextlib.contextmanager
def building(folder: str | Path) -> Iterator[Path]:
    """A folder beside that takes the name when the block ends well: a data set is whole, or absent.

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
