"""TFRecord shards, as the tfrecord library writes, indexes and reads them.

    folder/00000.tfrecord               records: length, crc of it, an Example in protocol buffers, crc of that
    folder/00000.tfindex                offset and bytes of each record: one line of text a record

An Example has `key`, `label`, and `image` as bytes or `tokens` as int64 (variable-length in protocol buffers) with
their type in `dtype`. On disk a sample takes 16 bytes of record frame, about 40 for names and lengths, and 10 to 20
in the index. There is no table of labels: finding one reads every record, once.

The library verifies no checksums and has no access by position; both are added here.
"""

import contextlib
import functools
import itertools
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from .dataset import TOKEN_TYPES, Fault, Sample, building, checked
from .shards import Shards, Table, save_index

NEEDS = ("tfrecord",)
DATA, INDEX = ".tfrecord", ".tfindex"
HEAD, TAIL = 12, 4  # bytes before an Example (its length and a crc) and after it (another crc)
UNKNOWN = -(2**63)  # the label of a sample that cannot be read


def write(samples: Iterable[Sample], folder: str | Path, kind: str, *, per_shard: int = 1000) -> None:
    """Write shards of `per_shard` samples, then read each again for its index. The folder is complete or absent."""
    from tfrecord.writer import TFRecordWriter

    rows = checked(samples, kind)
    with building(folder) as part:
        for number in itertools.count():
            if (first := next(rows, None)) is None:
                break
            shard = part / f"{number:05d}{DATA}"
            with contextlib.closing(TFRecordWriter(str(shard))) as writer:
                for sample in itertools.chain([first], itertools.islice(rows, per_shard - 1)):
                    writer.write(_features(sample, kind))
            build_index(shard)


class Records(Shards):
    """`verify` checks both checksums of a record; its length is always held against the index.

    `labels` and `keys` read every record, once; a record that can't be read has the label `UNKNOWN`.
    """

    suffix, index_suffix = DATA, INDEX

    def read_index(self, file: Path) -> Table:
        if not file.stat().st_size:  # numpy only warns
            raise ValueError("it is empty")
        table = np.loadtxt(file, np.int64, ndmin=2)  # (records, 2)
        if table.shape[1] != 2 or not len(table) or (table < 0).any():
            raise ValueError("expected lines of offset and bytes")
        return {"bytes": sum(table[-1].tolist()), "offsets": table[:, 0], "sizes": table[:, 1]}

    def build_index(self, shard: Path) -> tuple[Table, str]:
        return build_index(shard)

    @functools.cached_property
    def kind(self) -> str:
        """The kind of the first readable record."""
        for position in range(len(self)):
            with contextlib.suppress(OSError, ValueError):
                return "image" if "image" in _parsed(self._record(position)) else "tokens"
        return "image"

    @functools.cached_property
    def _about(self) -> tuple[np.ndarray, list[str]]:
        labels, keys = np.full(len(self), UNKNOWN, np.int64), [""] * len(self)
        for position in range(len(self)):
            item = self._checked_sample(position)
            if isinstance(item, Fault):
                self.faults.append(item)
            else:
                labels[position], keys[position] = item.label, item.key
        return labels, keys

    @property
    def labels(self) -> np.ndarray:
        return self._about[0]

    @property
    def keys(self) -> list[str]:
        return self._about[1]

    def read(self, position: int) -> Sample:
        return _sample(self._record(position))

    def _record(self, position: int) -> bytes:
        """The serialized Example at a position, after checking its frame."""
        raw = self._raw(position)
        self._verify_length(raw[:HEAD], int(self.sizes[position]))
        self._verify_content(raw[HEAD:-TAIL], raw[-TAIL:])
        return raw[HEAD:-TAIL]

    def _verify_length(self, head: bytes, size: int) -> None:
        if len(head) < HEAD or struct.unpack_from("<Q", head)[0] != size - HEAD - TAIL:
            raise ValueError("its record's length is another than the index's")
        if self.verify and _masked_crc(head[:8]) != head[8:]:
            raise ValueError("the crc of its record's length is wrong")

    def _verify_content(self, record: bytes, crc: bytes) -> None:
        if self.verify and _masked_crc(record) != crc:
            raise ValueError("the crc of its record is wrong: the content changed")

    def from_shard(self, file: str, piece: range) -> Iterator[Sample]:
        """By the library's reader, until it fails or disagrees with the index."""
        from tfrecord.reader import tfrecord_iterator

        if self._locate(piece.start)[1]:  # it can only start with a shard
            return
        records, whole = tfrecord_iterator(file), os.path.getsize(file)
        for position in piece:
            offset, size = int(self.offsets[position]), int(self.sizes[position])
            try:  # the library allocates whatever length a record says
                if offset + size > whole:
                    return
                self._verify_length(self._pread(file, offset, HEAD), size)
                record = bytes(next(records))  # a copy, as the next record overwrites the library's buffer
                if len(record) != size - HEAD - TAIL:
                    return
                if self.verify:
                    self._verify_content(record, self._pread(file, offset + size - TAIL, TAIL))
                sample = _sample(record)
            except Exception:  # damaged lengths raise an OverflowError, a MemoryError, a RuntimeError, …
                return
            yield sample


open_ = Records


def build_index(shard: Path) -> tuple[Table, str]:
    """See `Shards.build_index`. Reads only the records' lengths.

    The library's tool stops at a damaged length without an error, and lists a truncated record.
    """
    rows, at, size = [], 0, shard.stat().st_size
    with open(shard, "rb") as stream:
        while at < size:
            stream.seek(at)
            head = stream.read(HEAD)
            if len(head) < HEAD or _masked_crc(head[:8]) != head[8:]:
                break
            length = HEAD + struct.unpack_from("<Q", head)[0] + TAIL
            if at + length > size:
                break
            rows.append((at, length))
            at += length
    offsets, sizes = np.array(rows, np.int64).reshape(-1, 2).T
    lost = f"what comes after its first {len(rows)} samples is lost"
    why = "" if rows and at == size else f"truncated or damaged (no whole record at byte {at}); {lost}"
    if not why:
        save_index(shard.with_suffix(INDEX), "".join(f"{offset} {length}\n" for offset, length in rows))
    return {"bytes": size, "offsets": offsets, "sizes": sizes}, why


def _features(sample: Sample, kind: str) -> dict:
    about = {"key": (sample.key.encode(), "byte"), "label": (sample.label, "int")}
    if kind == "image":
        return about | {"image": (sample.data.tobytes(), "byte")}
    return about | {"tokens": (sample.data, "int"), "dtype": (sample.data.dtype.str[1:].encode(), "byte")}


def _parsed(record: bytes) -> dict:
    """The features of a record: name -> Feature."""
    from google.protobuf.message import DecodeError
    from tfrecord import example_pb2

    try:
        return example_pb2.Example.FromString(record).features.feature
    except DecodeError as error:
        raise ValueError(f"not an Example ({error})") from error


def _sample(record: bytes) -> Sample:
    features = _parsed(record)
    try:
        (key,), (label,) = features["key"].bytes_list.value, features["label"].int64_list.value
        if "image" in features:
            (image,) = features["image"].bytes_list.value
            return Sample(key.decode(), label, np.frombuffer(image, np.uint8))
        (dtype,) = features["dtype"].bytes_list.value
        if dtype.decode() not in TOKEN_TYPES:
            raise ValueError(f"tokens of type {dtype!r}")
        tokens = np.array(features["tokens"].int64_list.value, np.int64)
        return Sample(key.decode(), label, tokens.astype("<" + dtype.decode()))
    except ValueError as error:  # a feature that is missing has no values
        expected = "one key, one label, and one image or tokens with one dtype"
        raise ValueError(f"not a sample of ours: expected {expected} ({error})") from error


def _masked_crc(data: bytes) -> bytes:
    from tfrecord.writer import TFRecordWriter

    return TFRecordWriter.masked_crc(data)
