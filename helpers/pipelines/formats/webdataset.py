"""Tar shards, as the webdataset library writes and reads them, each with an index of ours beside.

    folder/00000.tar                    00000012.jpg, 00000012.json ({"key": …, "label": …}), 00000013.jpg, …
    folder/00000.idx.json               where each sample's data lies, its label, key and crc32

In order, a shard is one file read from end to end; tar knows no other way. The index adds access to any sample by one
`pread`, labels and keys without touching a shard, a count to hold a stream against, and the checksum that tar lacks. On
disk a sample costs two tar headers and one block for its json, 1.5 KiB, and up to half a KiB of padding.
"""

import json
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from helpers.lab.machine import NOT_INSTALLED, installed
from helpers.text.files import replacing

from .reader import Reader
from .sample import SUFFIXES, Fault, FormatError, Sample, admit, allowed, building, checked, pack, unpack
from .shards import Handles, Places, check_size, opened, some

INDEX = ".idx.json"
VERSION = 1
BLOCK = 512  # bytes of a tar block
COLUMNS = ("offsets", "sizes", "labels", "keys", "crc32")
KINDS = {suffix: kind for kind, suffix in SUFFIXES.items()}


def obstacle() -> str:
    return "" if installed("webdataset") else NOT_INSTALLED + "webdataset"


def write(samples: Iterable[Sample], folder: str | Path, kind: str, *, per_shard: int = 1000) -> None:
    """Write shards of `per_shard` samples, then read each once more for its index. The folder is whole, or absent."""
    import webdataset

    with building(folder) as part:
        pattern = str(part).replace("%", "%%") + "/%05d.tar"
        with webdataset.ShardWriter(pattern, maxcount=per_shard, maxsize=2**62, verbose=0, mtime=0) as writer:
            for place, sample in enumerate(checked(samples, kind)):
                about = {"key": sample.key, "label": sample.label}
                row = {"__key__": f"{place:08d}", SUFFIXES[kind]: pack(kind, sample.data), "json": about}
                writer.write(row)
        for shard in sorted(part.glob("*.tar")):
            _keep_index(shard, build_index(shard)[0])


def open_(
    folder: str | Path,
    *,
    faults: str = "refuse",
    check_image: bool = False,
    verify: bool = True,
    index: str | None = None,
    by_index: bool = False,
) -> Reader:
    """Reads the indexes, about 1 µs a sample. `verify` checks every sample's crc32, and is what finds a flipped bit.

    index="build" makes missing indexes, which reads those shards; of a damaged shard it is not kept on disk. `by_index`
    streams without webdataset's reader, one `pread` a sample: that one takes tar apart in Python, two members a sample,
    and spends several times as long on it as the disk does on a sample of a few kB.
    """
    allowed("index", index, (None, "build"))
    return Reader(Shards(Path(folder), faults, verify, index, by_index), faults, check_image)


class Shards:
    """Sample i is the i-th of all shards in order."""

    def __init__(self, folder: Path, policy: str, verify: bool, index: str | None, by_index: bool) -> None:
        self.verify, self.by_index, self.faults, self.handles = verify, by_index, [], Handles()
        found = opened(folder, ".tar", INDEX, policy, self.faults, lambda shard: self._index(shard, policy, index))
        some(sum(len(table["keys"]) for _, table in found), folder, self.faults)
        self.files = [file for file, _ in found]
        self.kind = found[0][1]["kind"]
        self.keys = [key for _, table in found for key in table["keys"]]
        gathered = {name: [value for _, table in found for value in table[name]] for name in COLUMNS}
        self.offsets, self.sizes, self.labels = (np.array(gathered[name], np.int64) for name in COLUMNS[:3])
        self.sums = np.array(gathered["crc32"], np.uint32)
        self.place = Places([len(table["keys"]) for _, table in found])
        self.shards = self.place.runs

    def _index(self, shard: Path, policy: str, index: str | None) -> dict:
        file = shard.with_suffix(INDEX)
        if file.is_file():
            table = _read_index(file)
        elif index == "build":
            table, fault = build_index(shard)
            if fault:
                admit(fault, policy, self.faults)
            else:
                _keep_index(shard, table)
        else:
            raise FormatError(Fault(str(file), None, 'no such index of the shard; index="build" makes one'))
        check_size(shard, table["bytes"], policy, self.faults)
        return table

    def file_of(self, place: int) -> str:
        return self.files[self.place(place)[0]]

    def read(self, place: int) -> Sample:
        file, offset, size = self.file_of(place), int(self.offsets[place]), int(self.sizes[place])
        try:
            raw = self.handles.pread(file, offset, size)
        except OSError as error:
            raise FormatError(Fault(file, place, f"cannot be read ({error.strerror})")) from error
        if len(raw) != size:
            raise FormatError(Fault(file, place, f"truncated: {len(raw)} of its {size} bytes at {offset} are there"))
        return self._sample(place, raw)

    def _sample(self, place: int, raw: bytes) -> Sample:
        try:
            if self.verify and zlib.crc32(raw) != self.sums[place]:
                raise ValueError("its crc32 is another than the index's: the content changed")
            return Sample(self.keys[place], int(self.labels[place]), unpack(self.kind, raw))
        except ValueError as error:
            raise FormatError(Fault(self.file_of(place), place, str(error))) from error

    def run(self, piece: range) -> Iterator[Sample]:
        """By webdataset's own reader, until it gives something else than the index says, or fails.

        On its own it ends a shard that is cut between two samples, or whose header is damaged, without a word.
        """
        import webdataset

        shard, within = self.place(piece.start)
        if within or self.by_index:
            return  # tar can only be read from its start; the index knows the rest
        stages = {"shardshuffle": False, "nodesplitter": None, "workersplitter": None, "empty_check": False}
        rows = iter(webdataset.WebDataset([self.files[shard]], **stages))
        for place in piece:
            try:
                raw = next(rows)[SUFFIXES[self.kind]]
                sample = self._sample(place, raw) if len(raw) == self.sizes[place] else None
            except (StopIteration, KeyError, OSError, ValueError, tarfile.TarError):
                return
            if sample is None:
                return
            yield sample

    def close(self) -> None:
        self.handles.close()


def build_index(shard: Path) -> tuple[dict, Fault | None]:
    """The index of a shard, and what is wrong with it: samples after that are not in the index. Reads all of it."""
    table: dict = {"version": VERSION, "kind": "image", "bytes": shard.stat().st_size} | {name: [] for name in COLUMNS}
    about: dict[str, dict] = {}  # member name -> what is known of a sample so far
    end, why = 0, ""
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                name, _, suffix = member.name.partition(".")
                raw = tar.extractfile(member).read()
                end = member.offset_data + -(-member.size // BLOCK) * BLOCK
                if suffix in KINDS:
                    table["kind"] = KINDS[suffix]
                    where = {"offsets": member.offset_data, "sizes": len(raw), "crc32": zlib.crc32(raw)}
                    about[name] = about.get(name, {}) | where
                elif suffix == "json":
                    said = json.loads(raw)
                    about[name] = about.get(name, {}) | {"labels": said["label"], "keys": said["key"]}
    except (tarfile.TarError, OSError, ValueError, KeyError, AttributeError) as error:
        why = str(error)
    whole = [row for row in about.values() if len(row) == len(COLUMNS)]
    for name in COLUMNS:
        table[name] = [row[name] for row in whole]
    with open(shard, "rb") as stream:
        stream.seek(end)
        if not why and stream.read(2 * BLOCK) != bytes(2 * BLOCK):
            why = f"no end mark at byte {end}"
    if not why and len(whole) == len(about):
        return table, None
    why = why or "a sample without its json"
    said = f"truncated or no tar file ({why}); what comes after its first {len(whole)} samples is lost"
    return table, Fault(str(shard), None, said)


def _keep_index(shard: Path, table: dict) -> None:
    with replacing(shard.with_suffix(INDEX)) as stream:
        stream.write(json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode())


def _read_index(file: Path) -> dict:
    try:
        table = json.loads(file.read_bytes())
        if table["version"] != VERSION:
            raise ValueError(f"version {table['version']!r}; this reads version {VERSION}")
        if table["kind"] not in SUFFIXES or len({len(table[name]) for name in COLUMNS}) != 1:
            raise ValueError("columns of unequal length, or of an unknown kind")
        return table
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(Fault(str(file), None, f"not a readable index ({error})")) from error
