"""TFRecord shards, written, indexed and parsed as by the tfrecord library.

    folder/00000.tfrecord               records: length, crc of it, an Example in protocol buffers, crc of that
    folder/00000.tfindex                offset and bytes of each record: one line of text a record

An Example has `key`, `label`, and `image` as bytes or `tokens` as int64 (variable-length in protocol buffers) with
their type in `dtype`. On disk a sample takes 16 bytes of record frame, about 40 for names and lengths, and 10 to 20
in the index. There is no table of labels: finding one reads every record, once.

The library's reader verifies no checksum and has no access by position. So records are located and verified here.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ...lab.files import building
from .dataset import Sample, checked
from .shards import Shards
from .table import ROW, Table

NEEDS = ("tfrecord",)
DATA, INDEX = ".tfrecord", ".tfindex"
HEAD, TAIL = 12, 4  # bytes before an Example (its length and a crc) and after it (another crc)


def write(samples: Iterable[Sample], folder: str | Path, kind: str, *, per_shard: int = 1000) -> None:
    """Write shards of `per_shard` samples, then read each again for its index. The folder is complete or absent."""
    from tfrecord.writer import TFRecordWriter

    rows = checked(samples, kind)
    with building(folder) as part:
        for number in itertools.count():
            if not (shard := list(itertools.islice(rows, per_shard))):
                break
            with contextlib.closing(TFRecordWriter(str(part / f"{number:05d}{DATA}"))) as writer:
                for sample in shard:
                    writer.write(_features(sample, kind))
        open_(part, index="build")


class Records(Shards):
    """`verify` checks both checksums of a record; its length is always held against the index.

    `labels` and `keys` each read every record, once.
    """

    suffix, index_suffix = DATA, INDEX

    def read_index(self, file: Path) -> Table:
        offsets, sizes = np.loadtxt(file, np.int64, ndmin=2).T  # (records,) each
        rows = np.zeros(len(offsets), ROW)
        rows["offset"], rows["size"] = offsets, sizes
        return Table({"bytes": int(offsets[-1]) + int(sizes[-1])}, rows, b"")

    def build_index(self, shard: Path, index: Path) -> None:
        from tfrecord.tools.tfrecord2idx import create_index

        create_index(str(shard), str(index))

    @functools.cached_property
    def kind(self) -> str:
        """The kind of the first record."""
        return "image" if "image" in _features_of(self._raw(0)[HEAD:-TAIL]) else "tokens"

    @functools.cached_property
    def labels(self) -> np.ndarray:
        return np.array([sample.label for sample in self.stream()], np.int64)

    @functools.cached_property
    def keys(self) -> list[str]:
        return [sample.key for sample in self.stream()]

    def _sample(self, position: int, raw: bytes | memoryview) -> Sample:
        head, record, crc = bytes(raw[:HEAD]), bytes(raw[HEAD:-TAIL]), raw[-TAIL:]
        if int.from_bytes(head[:8], "little") != len(record):
            raise ValueError("its record's length is another than the index's")
        if self.verify and (_masked_crc(head[:8]), _masked_crc(record)) != (head[8:], crc):
            raise ValueError("a crc of its record is wrong: the content changed")
        return _parsed(record)


open_ = Records


def _features(sample: Sample, kind: str) -> dict:
    about = {"key": (sample.key.encode(), "byte"), "label": (sample.label, "int")}
    if kind == "image":
        return about | {"image": (sample.data.tobytes(), "byte")}
    return about | {"tokens": (sample.data, "int"), "dtype": (sample.data.dtype.str[1:].encode(), "byte")}


def _features_of(record: bytes) -> dict:
    """Name -> Feature."""
    from tfrecord import example_pb2

    return example_pb2.Example.FromString(record).features.feature


def _parsed(record: bytes) -> Sample:
    features = _features_of(record)
    (key,), (label,) = features["key"].bytes_list.value, features["label"].int64_list.value
    if "image" in features:
        (image,) = features["image"].bytes_list.value
        return Sample(key.decode(), label, np.frombuffer(image, np.uint8))
    (dtype,) = features["dtype"].bytes_list.value
    tokens = np.array(features["tokens"].int64_list.value, np.int64)
    return Sample(key.decode(), label, tokens.astype("<" + dtype.decode()))


def _masked_crc(data: bytes) -> bytes:
    from tfrecord.writer import TFRecordWriter

    return TFRecordWriter.masked_crc(data)
