"""The same samples in small files, tar shards, one memory-mapped file or TFRecord, with a common interface.

    from helpers.pipelines.formats import FORMATS, Sample

    FORMATS["mapped"].write(samples, folder, "image")   # samples: Sample(key, label, data), data a JPEG's bytes
    reader = FORMATS["mapped"].open_(folder)            # len(reader), reader[i], reader.stream(), reader.find(label)

            one sample by position     in order                   a label's positions      to change one sample
files       open, read, close          the same, each             from the table           replace its file
webdataset  one read at an offset      one file a shard           from the index           write its shard
mapped      page faults                the same, read ahead       from the table           write the file
tfrecord    its shard up to it         one file a shard, parsed   by reading every one     write its shard

Small files cost three system calls a sample, and half a block on disk. TFRecord is the tfrecord library's, which reads
a shard from its start and verifies no checksum. The other two are in `random_access`.
"""

import bisect
import contextlib
import csv
import functools
import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..lab.files import building
from . import random_access
from .reader import KINDS, SUFFIXES, FormatError, Reader, Sample, checked, pack

__all__ = ["FORMATS", "Files", "FormatError", "Records", "Sample"]

TABLE = "labels.csv"
COLUMNS = ("file", "label", "key", "bytes", "crc32")


def write_files(samples: Iterable[Sample], folder: str | Path, kind: str) -> None:
    """A file for each sample, in a folder for each label, and a table of all files. Complete or absent."""
    with building(folder) as part:
        rows = []
        for position, (key, label, data) in enumerate(checked(samples, kind)):
            name, raw = f"{label}/{position:08d}.{SUFFIXES[kind]}", pack(kind, data)
            (part / name).parent.mkdir(exist_ok=True)
            (part / name).write_bytes(raw)
            rows.append((name, label, key, len(raw), zlib.crc32(raw)))
        with open(part / TABLE, "w", newline="", encoding="utf-8") as stream:
            csv.writer(stream, quoting=csv.QUOTE_NONNUMERIC).writerows([COLUMNS, *rows])


class Files(Reader):
    """Sample i is line i of the table, which is read at opening: about 2 µs a sample."""

    def _open(self) -> None:
        with open(self.folder / TABLE, newline="", encoding="utf-8") as stream:
            _, *rows = csv.reader(stream)
        self.names, labels, self.keys, _, sums = zip(*rows, strict=True)
        self.labels, self.sums = np.array(labels, np.int64), np.array(sums, np.uint32)
        self.kind, self.shards = KINDS[self.names[0].rpartition(".")[2]], [range(len(labels))]

    def file_of(self, position: int) -> str:
        return os.path.join(self.folder, self.names[position])

    def read(self, position: int) -> Sample:
        with open(self.file_of(position), "rb", buffering=0) as stream:
            return self._sample(position, stream.read())


def write_records(samples: Iterable[Sample], folder: str | Path, kind: str, *, per_shard: int = 1000) -> None:
    """Shards of `per_shard` Examples, each with the library's index. Complete or absent.

    An Example has `key`, `label`, and `image` as bytes or `tokens` as int64 with their type in `dtype`: 16 bytes of
    record frame, about 40 for names and lengths, and 10 to 20 in the index.
    """
    from tfrecord.tools.tfrecord2idx import create_index
    from tfrecord.writer import TFRecordWriter

    rows = checked(samples, kind)
    with building(folder) as part:
        for number in itertools.count():
            if not (shard := list(itertools.islice(rows, per_shard))):
                break
            file = part / f"{number:05d}.tfrecord"
            with contextlib.closing(TFRecordWriter(str(file))) as writer:
                for sample in shard:
                    writer.write(_features(sample, kind))
            create_index(str(file), str(file.with_suffix(".tfindex")))


class Records(Reader):
    """`verify` has no effect. A sample by position costs its shard up to there; `labels` and `keys` read every one."""

    def _open(self) -> None:
        indexes = sorted(self.folder.glob("*.tfindex"))
        if not indexes:
            raise ValueError("no shards 00000.tfrecord, 00000.tfindex, …")
        self.files = [str(index.with_suffix(".tfrecord")) for index in indexes]
        counts = (len(index.read_text().splitlines()) for index in indexes)
        self.starts = [0, *itertools.accumulate(counts)]
        self.shards = [range(a, b) for a, b in itertools.pairwise(self.starts)]

    @functools.cached_property
    def kind(self) -> str:
        """The kind of the first record."""
        return next("image" if "image" in row else "tokens" for row in self._rows(range(1)))

    @functools.cached_property
    def labels(self) -> np.ndarray:
        return np.array([sample.label for sample in self.stream()], np.int64)

    @functools.cached_property
    def keys(self) -> list[str]:
        return [sample.key for sample in self.stream()]

    def file_of(self, position: int) -> str:
        return self.files[bisect.bisect_right(self.starts, position) - 1]

    def read(self, position: int) -> Sample:
        return next(self.in_order(range(position, position + 1)))

    def in_order(self, piece: range) -> Iterator[Sample]:
        return map(_sample, self._rows(piece))

    def _rows(self, piece: range) -> Iterator[dict]:
        """The features of the records of a piece of one shard."""
        from tfrecord.reader import tfrecord_loader

        number = bisect.bisect_right(self.starts, piece.start) - 1
        rows = tfrecord_loader(self.files[number], None)
        return itertools.islice(rows, piece.start - self.starts[number], piece.stop - self.starts[number])


def _features(sample: Sample, kind: str) -> dict:
    about = {"key": (sample.key.encode(), "byte"), "label": (sample.label, "int")}
    if kind == "image":
        return about | {"image": (sample.data.tobytes(), "byte")}
    return about | {"tokens": (sample.data, "int"), "dtype": (sample.data.dtype.str[1:].encode(), "byte")}


def _sample(row: dict) -> Sample:
    try:
        key, label = row["key"].decode(), int(row["label"][0])
        if "image" in row:
            return Sample(key, label, np.frombuffer(row["image"], np.uint8))
        return Sample(key, label, row["tokens"].astype("<" + row["dtype"].decode()))
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"its record is damaged: {error!r}") from error


class Format(NamedTuple):
    """`write(samples, folder, kind)`, `open_(folder)` returns a `Reader`; `needs` must be installed."""

    write: Callable[..., None]
    open_: Callable[..., Reader]
    needs: tuple[str, ...] = ()


FORMATS = {
    "files": Format(write_files, Files),
    "webdataset": Format(random_access.write_tar, random_access.Tar, ("webdataset",)),
    "mapped": Format(random_access.write_mapped, random_access.Mapped),
    "tfrecord": Format(write_records, Records, ("tfrecord",)),
}
