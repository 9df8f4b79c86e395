"""One beton, as the ffcv library writes and lays it out: tables, then pages of 2 MiB or more with the data.

A sample is four fields: key, label, crc32 and data (named `image`, or `tokens_` and their type). It is found by ffcv's
own tables and is a slice of the mapped file. ffcv's Loader isn't used: it gives batches of one size, padded to the
longest sample, from threads of its own and after seconds of compiling. What is read here is the layout alone.

Installing ffcv builds C++ against OpenCV and libjpeg-turbo, and ends with "Could not find required package" where their
development packages and pkg-config are missing (`apt install libopencv-dev libturbojpeg0-dev pkg-config`).
"""

import contextlib
import io
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from helpers.lab.machine import NOT_INSTALLED, installed

from .reader import Reader
from .sample import TOKEN_TYPES, Fault, FormatError, Sample, admit, building, checked

NAME = "samples.beton"
DATA = {"image": np.dtype("u1")} | {f"tokens_{name}": np.dtype("<" + name) for name in TOKEN_TYPES}
PAGE = 1 << 21


def obstacle() -> str:
    return "" if installed("ffcv") else NOT_INSTALLED + "ffcv"


def write(samples: Iterable[Sample], folder: str | Path, kind: str) -> None:
    """Write the beton, in a process that ffcv starts. All samples are in memory meanwhile."""
    from ffcv.fields import BytesField, IntField
    from ffcv.writer import DatasetWriter

    rows = [
        (np.frombuffer(key.encode(), np.uint8), label, zlib.crc32(data), data.view(np.uint8), data.dtype.str[1:])
        for key, label, data in checked(samples, kind)
    ]
    name = kind if kind == "image" else f"{kind}_{rows[0][-1]}"
    fields = {"key": BytesField(), "label": IntField(), "crc32": IntField(), name: BytesField()}
    longest = max(max(len(row[0]), len(row[3])) for row in rows)
    page = max(PAGE, 1 << longest.bit_length())
    with building(folder) as part, contextlib.redirect_stderr(io.StringIO()):  # where it draws its progress
        DatasetWriter(str(part / NAME), fields, page_size=page, num_workers=1).from_indexed_dataset(
            [row[:-1] for row in rows]
        )


def open_(folder: str | Path, *, faults: str = "refuse", check_image: bool = False, verify: bool = True) -> Reader:
    """Reads the tables. `verify` checks every sample's crc32, a field that ffcv itself knows nothing of.

    A beton has no magic number and no checksum of its tables; what ffcv can't read is refused whatever `faults` says.
    """
    return Reader(Beton(Path(folder) / NAME, faults, verify), faults, check_image)


class Beton:
    """Sample i is row i of the tables."""

    def __init__(self, file: Path, policy: str, verify: bool) -> None:
        from ffcv.reader import Reader as Tables

        self.file, self.verify, self.faults = str(file), verify, []
        self._map: np.ndarray | None = None
        try:
            self.there = os.stat(file).st_size
            tables = Tables(self.file)
            if tables.field_names[:3] != ["key", "label", "crc32"] or tables.field_names[3] not in DATA:
                raise ValueError(f"has the fields {tables.field_names}")
            self.rows = tables.metadata
            if not len(self.rows) or len(self.rows) != tables.num_samples:
                raise ValueError(f"truncated: {len(self.rows)} of {tables.num_samples} rows of its tables are there")
        except Exception as error:  # of a file that is no beton, ffcv makes an AssertionError, a KeyError, …
            raise FormatError(Fault(self.file, None, f"not a beton of ours ({error})")) from error
        table = 2 * len(self.rows) * tables.alloc_table.itemsize  # at the end: where each key and each data lies
        size = int(tables.header["alloc_table_ptr"]) + table
        if self.there != size:
            fault = Fault(self.file, None, f"truncated or changed: it has {self.there} bytes of {size}")
            admit(fault, policy, self.faults)
        self.kind, self.dtype = tables.field_names[3].split("_")[0], DATA[tables.field_names[3]]
        self.labels, self.shards = self.rows["f1"].astype(np.int64), [range(len(self.rows))]

    def _end(self, place: int) -> int:
        return max(sum(self.rows[field][place].tolist()) for field in ("f0", "f3"))

    @property
    def keys(self) -> list[str]:
        return [self._slice(place, "f0").tobytes().decode() for place in range(len(self.rows))]

    def file_of(self, place: int) -> str:
        return self.file

    def _slice(self, place: int, field: str) -> np.ndarray:
        if self._map is None:
            self._map = np.memmap(self.file, np.uint8, "r")
        pointer, size = self.rows[field][place].tolist()
        return self._map[pointer : pointer + size].view(np.ndarray)

    def read(self, place: int) -> Sample:
        if self._end(place) > self.there:
            raise FormatError(Fault(self.file, place, f"truncated: the file ends at byte {self.there}"))
        raw = self._slice(place, "f3")
        if self.verify and zlib.crc32(raw) != self.rows["f2"][place]:
            raise FormatError(Fault(self.file, place, "its crc32 is another than its field's: the content changed"))
        data = np.frombuffer(raw, self.dtype) if len(raw) else np.empty(0, self.dtype)
        return Sample(self._slice(place, "f0").tobytes().decode(), int(self.labels[place]), data)

    def run(self, piece: range) -> Iterator[Sample]:
        return iter(())

    def close(self) -> None:
        self._map = None

    def __getstate__(self) -> dict:
        return vars(self) | {"_map": None}
