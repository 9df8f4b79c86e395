"""TFRecord shards, as the tfrecord library writes, indexes and reads them.

    folder/00000.tfrecord               records: length, crc of it, an Example in protocol buffers, crc of that
    folder/00000.tfindex                offset and bytes of each record: one line of text a record

An Example has `key`, `label`, and `image` as bytes or `tokens` as int64, which protocol buffers write in as few bytes
as a number needs, with their type beside. On disk a sample costs 16 bytes around its record, about 40 for names and
lengths, and 10 to 20 of the index. There is no table of labels: to find one is to read every record, once.

The library checks no checksum and has no access by place; both are done here with its own parts.
"""

import contextlib
import functools
import io
import itertools
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from helpers.lab.machine import NOT_INSTALLED, installed

from .reader import Reader
from .sample import TOKEN_TYPES, Fault, FormatError, Sample, admit, allowed, building, checked
from .shards import Handles, Places, check_size, opened, some

DATA, INDEX = ".tfrecord", ".tfindex"
HEAD, TAIL = 12, 4  # bytes before an Example, its length and a crc, and behind it, another crc
UNKNOWN = -(2**63)  # stands for the label of a sample that cannot be read


def obstacle() -> str:
    return "" if installed("tfrecord") else NOT_INSTALLED + "tfrecord"


def write(samples: Iterable[Sample], folder: str | Path, kind: str, *, per_shard: int = 1000) -> None:
    """Write shards of `per_shard` samples, then read each once more for its index. The folder is whole, or absent."""
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


def open_(
    folder: str | Path,
    *,
    faults: str = "refuse",
    check_image: bool = False,
    verify: bool = True,
    index: str | None = None,
) -> Reader:
    """Reads the indexes, about 1 µs a sample. `verify` checks both checksums of a record: it finds a flipped bit.
    Without it the library believes a length that is damaged, and claims so much memory.

    index="build" makes missing indexes, which reads those shards; of a damaged shard it is not kept on disk.
    """
    allowed("index", index, (None, "build"))
    return Reader(Records(Path(folder), faults, verify, index), faults, check_image)


class Records:
    """Sample i is the i-th record of all shards in order."""

    def __init__(self, folder: Path, policy: str, verify: bool, index: str | None) -> None:
        self.verify, self.policy, self.faults, self.handles = verify, policy, [], Handles()
        found = opened(folder, DATA, INDEX, policy, self.faults, lambda shard: self._index(shard, policy, index))
        some(sum(len(table) for _, table in found), folder, self.faults)
        self.files = [file for file, _ in found]
        self.index = np.concatenate([table for _, table in found])  # (N, 2) int64: offset, bytes
        self.place = Places([len(table) for _, table in found])
        self.shards = self.place.runs

    def _index(self, shard: Path, policy: str, index: str | None) -> np.ndarray:
        file = shard.with_suffix(INDEX)
        if file.is_file():
            table = _read_index(file)
        elif index == "build":
            table, fault = build_index(shard)
            if fault:
                admit(fault, policy, self.faults)
                return table
        else:
            raise FormatError(Fault(str(file), None, 'no such index of the shard; index="build" makes one'))
        check_size(shard, int(table[-1].sum()), policy, self.faults)
        return table

    @functools.cached_property
    def kind(self) -> str:
        """What the first record that can be read has."""
        for place in range(len(self.index)):
            with contextlib.suppress(FormatError):
                return "image" if "image" in self._example(place, self._record(place)) else "tokens"
        return "image"

    @functools.cached_property
    def _about(self) -> tuple[np.ndarray, list[str]]:
        """Labels and keys: of every record. One that can't be read has the label `UNKNOWN`, and its fault is kept."""
        labels, keys = np.full(len(self.index), UNKNOWN, np.int64), [""] * len(self.index)
        for place in range(len(labels)):
            try:
                sample = self.read(place)
                labels[place], keys[place] = sample.label, sample.key
            except FormatError as error:
                admit(error.fault, self.policy, self.faults)
        return labels, keys

    @property
    def labels(self) -> np.ndarray:
        return self._about[0]

    @property
    def keys(self) -> list[str]:
        return self._about[1]

    def file_of(self, place: int) -> str:
        return self.files[self.place(place)[0]]

    def read(self, place: int) -> Sample:
        return self._sample(place, self._record(place))

    def _record(self, place: int) -> bytes:
        """The Example at a place, its frame checked."""
        file, (offset, size) = self.file_of(place), self.index[place].tolist()
        try:
            raw = self.handles.pread(file, offset, size)
        except OSError as error:
            raise FormatError(Fault(file, place, f"cannot be read ({error.strerror})")) from error
        if len(raw) != size or size < HEAD + TAIL:
            said = f"truncated: {len(raw)} of the {size} bytes of its record at {offset} are there"
            raise FormatError(Fault(file, place, said))
        self._verify_length(place, raw[:HEAD], size)
        self._verify(place, raw[HEAD:-TAIL], raw[-TAIL:])
        return raw[HEAD:-TAIL]

    def _verify_length(self, place: int, head: bytes, size: int) -> None:
        if len(head) < HEAD or struct.unpack_from("<Q", head)[0] != size - HEAD - TAIL:
            raise FormatError(Fault(self.file_of(place), place, "its record's length is another than the index's"))
        if self.verify and _masked_crc(head[:8]) != head[8:]:
            raise FormatError(Fault(self.file_of(place), place, "the crc of its record's length is wrong"))

    def _verify(self, place: int, record: bytes, crc: bytes) -> None:
        if self.verify and _masked_crc(record) != crc:
            raise FormatError(Fault(self.file_of(place), place, "the crc of its record is wrong: the content changed"))

    def _example(self, place: int, record: bytes) -> dict:
        """The features of a record, as the library gives them."""
        from google.protobuf.message import DecodeError
        from tfrecord import example_pb2, reader

        try:
            features = example_pb2.Example.FromString(record).features
            return reader.extract_feature_dict(features, None, {})
        except (DecodeError, IndexError) as error:  # the library takes a feature without a value for a list of none
            raise FormatError(Fault(self.file_of(place), place, f"not an Example ({error})")) from error

    def _sample(self, place: int, record: bytes) -> Sample:
        features = self._example(place, record)
        try:
            key, label = bytes(features["key"]).decode(), int(features["label"][0])
            if "image" in features:
                return Sample(key, label, np.frombuffer(features["image"], np.uint8))
            dtype = bytes(features["dtype"]).decode()
            if dtype not in TOKEN_TYPES:
                raise ValueError(f"tokens of type {dtype!r}")
            return Sample(key, label, np.asarray(features["tokens"]).astype("<" + dtype))
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise FormatError(Fault(self.file_of(place), place, f"not a sample of ours ({error})")) from error

    def run(self, piece: range) -> Iterator[Sample]:
        """By the library's own reader, until it gives something else than the index says, or fails."""
        from tfrecord.reader import tfrecord_iterator

        shard, within = self.place(piece.start)
        if within:
            return
        file = self.files[shard]
        records = tfrecord_iterator(file)
        for place in piece:
            offset, size = self.index[place].tolist()
            try:
                if self.verify:
                    self._verify_length(place, self.handles.pread(file, offset, HEAD), size)
                record = bytes(next(records))  # it gives a view of what the next one overwrites
                if len(record) != size - HEAD - TAIL:
                    return
                if self.verify:
                    self._verify(place, record, self.handles.pread(file, offset + size - TAIL, TAIL))
                sample = self._sample(place, record)
            except Exception:  # a length of nonsense is an OverflowError, a MemoryError, a RuntimeError, …
                return
            yield sample

    def close(self) -> None:
        self.handles.close()


def build_index(shard: Path) -> tuple[np.ndarray, Fault | None]:
    """The index of a shard by the library's tool, and what is wrong: records after that aren't in it. Reads all of it.

    The tool ends at a damaged length without an error, and lists a record of which only a part is there.
    """
    from tfrecord.tools.tfrecord2idx import create_index

    file, size = shard.with_suffix(INDEX), shard.stat().st_size
    beside = file.with_name(f".{file.name}.part")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints where it stops
            create_index(str(shard), str(beside))
        table = _read_index(beside) if beside.stat().st_size else np.empty((0, 2), np.int64)
        whole = _whole(shard, table)
        if len(whole) and whole[-1].sum() == size:
            beside.replace(file)
            return whole, None
    finally:
        beside.unlink(missing_ok=True)
    said = f"truncated, or no TFRecord file: what comes after its first {len(whole)} records is lost"
    return whole, Fault(str(shard), None, said)


def _whole(shard: Path, table: np.ndarray) -> np.ndarray:
    """The lines of an index up to the first whose record isn't as long as it says itself."""
    with open(shard, "rb") as stream:
        for row, (offset, size) in enumerate(table.tolist()):
            stream.seek(offset)
            head = stream.read(HEAD)
            if len(head) < HEAD or _masked_crc(head[:8]) != head[8:]:
                return table[:row]
            if struct.unpack_from("<Q", head)[0] != size - HEAD - TAIL:
                return table[:row]
    return table


def _read_index(file: Path) -> np.ndarray:
    try:
        if not file.stat().st_size:  # numpy only warns
            raise ValueError("it is empty")
        table = np.loadtxt(file, np.int64, ndmin=2)
        if table.shape[1] != 2 or not len(table) or (table < 0).any():
            raise ValueError("expected lines of offset and bytes")
        return table
    except (OSError, ValueError, IndexError) as error:
        raise FormatError(Fault(str(file), None, f"not a readable index ({error})")) from error


def _features(sample: Sample, kind: str) -> dict:
    about = {"key": (sample.key.encode(), "byte"), "label": (sample.label, "int")}
    if kind == "image":
        return about | {"image": (sample.data.tobytes(), "byte")}
    return about | {"tokens": (sample.data, "int"), "dtype": (sample.data.dtype.str[1:].encode(), "byte")}


def _masked_crc(data: bytes) -> bytes:
    from tfrecord.writer import TFRecordWriter

    return TFRecordWriter.masked_crc(data)
