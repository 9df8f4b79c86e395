"""TFRecord shards, written, indexed and read by the tfrecord library.

    folder/00000.tfrecord               records: length, crc of it, an Example in protocol buffers, crc of that
    folder/00000.tfindex                offset and bytes of each record: one line of text a record

An Example has `key`, `label`, and `image` as bytes or `tokens` as int64 (variable-length in protocol buffers) with
their type in `dtype`. On disk a sample takes 16 bytes of record frame, about 40 for names and lengths, and 10 to 20
in the index.

The library reads a shard from its start and verifies no checksum. So a sample by position costs its shard up to there,
and labels cost every record, once.
"""

import bisect
import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ...lab.files import building
from .dataset import FormatError, Reader, Sample, checked, naming

NEEDS = ("tfrecord",)
DATA, INDEX = ".tfrecord", ".tfindex"


def write(samples: Iterable[Sample], folder: str | Path, kind: str, *, per_shard: int = 1000) -> None:
    """Write shards of `per_shard` samples, each with its index. The folder is complete or absent."""
    from tfrecord.tools.tfrecord2idx import create_index
    from tfrecord.writer import TFRecordWriter

    rows = checked(samples, kind)
    with building(folder) as part:
        for number in itertools.count():
            if not (shard := list(itertools.islice(rows, per_shard))):
                break
            file = part / f"{number:05d}{DATA}"
            with contextlib.closing(TFRecordWriter(str(file))) as writer:
                for sample in shard:
                    writer.write(_features(sample, kind))
            create_index(str(file), str(file.with_suffix(INDEX)))


class Records(Reader):
    """`verify` has no effect. `labels` and `keys` each read every record, once."""

    def _open(self) -> None:
        indexes = sorted(self.folder.glob(f"*{INDEX}"))
        if not indexes:
            raise FormatError(f"{self.folder}: no shards 00000{DATA}, 00000{INDEX}, …")
        self.files = [str(index.with_suffix(DATA)) for index in indexes]
        self.starts = [0, *itertools.accumulate(map(_records, indexes))]
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
        for sample in self.in_order(range(position, position + 1)):
            return sample
        raise ValueError("its shard ends before it")

    def in_order(self, piece: range) -> Iterator[Sample]:
        return map(_sample, self._rows(piece))

    def _rows(self, piece: range) -> Iterator[dict]:
        """The features of the records of a piece of one shard."""
        from google.protobuf.message import DecodeError
        from tfrecord.reader import tfrecord_loader

        number = bisect.bisect_right(self.starts, piece.start) - 1
        rows = tfrecord_loader(self.files[number], None)
        try:
            yield from itertools.islice(rows, piece.start - self.starts[number], piece.stop - self.starts[number])
        except (DecodeError, IndexError, MemoryError, OverflowError, RuntimeError) as error:
            raise ValueError(f"the tfrecord library can't read it: {error!r}") from error


open_ = Records


def _records(index: Path) -> int:
    """The number of records of an index, whose shard must have the size that it says."""
    with naming(index):
        offsets, sizes = np.loadtxt(index, np.int64, ndmin=2).T  # (records,) each
    shard, expected = index.with_suffix(DATA), int(offsets[-1] + sizes[-1])
    with naming(shard):
        if (size := shard.stat().st_size) != expected:
            raise ValueError(f"truncated or changed: it has {size} bytes; its index says {expected} bytes")
    return len(offsets)


def _features(sample: Sample, kind: str) -> dict:
    about = {"key": (sample.key.encode(), "byte"), "label": (sample.label, "int")}
    if kind == "image":
        return about | {"image": (sample.data.tobytes(), "byte")}
    return about | {"tokens": (sample.data, "int"), "dtype": (sample.data.dtype.str[1:].encode(), "byte")}


def _sample(row: dict) -> Sample:
    key, label = row["key"].decode(), int(row["label"][0])
    if "image" in row:
        return Sample(key, label, np.frombuffer(row["image"], np.uint8))
    return Sample(key, label, row["tokens"].astype("<" + row["dtype"].decode()))
