"""One beton file in the layout of the ffcv library: tables, and pages of 2 MiB or more with the data.

A sample has four fields: key, label, crc32 and data (named `image`, or `tokens_` and the dtype). It is located by
ffcv's tables and is a slice of the mapped file. ffcv's Loader isn't used: it pads batches to the longest sample, and
uses its own threads after seconds of compiling. Only the file layout is measured here.

Installing ffcv builds C++ against OpenCV and libjpeg-turbo, and fails with "Could not find required package" if their
development packages or pkg-config are missing (`apt install libopencv-dev libturbojpeg0-dev pkg-config`).
"""

import contextlib
import io
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from .dataset import TOKEN_TYPES, Sample, building, checked, naming
from .mapped import OneFile

NEEDS = ("ffcv",)
NAME = "samples.beton"
DATA = {"image": np.dtype("u1")} | {f"tokens_{name}": np.dtype("<" + name) for name in TOKEN_TYPES}
PAGE = 1 << 21


def write(samples: Iterable[Sample], folder: str | Path, kind: str) -> None:
    """Write the beton, in a process that ffcv starts, with all samples in memory."""
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
    with building(folder) as part, contextlib.redirect_stderr(io.StringIO()):  # hides its progress bar
        DatasetWriter(str(part / NAME), fields, page_size=page, num_workers=1).from_indexed_dataset(
            [row[:-1] for row in rows]
        )


class Beton(OneFile):
    """Sample i is row i of ffcv's tables. `verify` checks our crc32 field.

    A beton has no magic number and no checksum of its tables; a file that ffcv can't read always raises.
    """

    name = NAME

    def _open(self) -> None:
        from ffcv.reader import Reader as Tables

        with naming(self.file, "not a beton of ours"):
            self.file_bytes = os.stat(self.file).st_size
            try:
                tables = Tables(self.file)
            except Exception as error:  # for other files ffcv raises an AssertionError, a KeyError, …
                raise ValueError(str(error)) from error
            if tables.field_names[:3] != ["key", "label", "crc32"] or tables.field_names[3] not in DATA:
                raise ValueError(f"has the fields {tables.field_names}")
            self.rows = tables.metadata
            if not len(self.rows) or len(self.rows) != tables.num_samples:
                raise ValueError(f"truncated: {len(self.rows)} of {tables.num_samples} rows of its tables are there")
        table = 2 * len(self.rows) * tables.alloc_table.itemsize  # at the file's end: offsets of keys and data
        self._check_size(int(tables.header["alloc_table_ptr"]) + table)
        self.kind, self.dtype = tables.field_names[3].split("_")[0], DATA[tables.field_names[3]]
        self.labels, self.sums = self.rows["f1"].astype(np.int64), self.rows["f2"]
        self.shards = [range(len(self.rows))]

    @property
    def keys(self) -> list[str]:
        return [self._key(position) for position in range(len(self.rows))]

    def read(self, position: int) -> Sample:
        data = self._slice(*self.rows["f3"][position].tolist(), self.dtype)
        self._check(position, data)
        return Sample(self._key(position), int(self.labels[position]), data)

    def _key(self, position: int) -> str:
        return self._slice(*self.rows["f0"][position].tolist(), np.dtype("u1")).tobytes().decode()


open_ = Beton
