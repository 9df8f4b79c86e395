"""Tar shards, written by the webdataset library, and read by an index of ours, as the library can only start with a
shard's first sample.

    folder/00000.tar                    00000012.jpg, 00000012.json ({"key": …, "label": …}), 00000013.jpg, …
    folder/00000.index                  each sample's offset, size, label, crc32 and key; see `table`

Any tar reader reads a shard from its start. The index adds access to a sample by one `pread`, labels and keys without
reading a shard, a count, and a checksum. In order, one `pread` of 1 MiB serves all samples in it, and a sample costs
some 3 µs of Python; webdataset's reader parses two members a sample in Python, more than ten times as much. On disk a
sample takes two tar headers and one block for its json, 1.5 KiB, and up to half a KiB of padding.

A shard that is missing, or of another size than in its index, is refused at opening.
"""

import bisect
import itertools
import json
import operator
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ...lab import files
from ...lab.arguments import check_choice
from . import table
from .dataset import KINDS, SUFFIXES, FormatError, Reader, Sample, checked, naming, pack

NEEDS = ("webdataset",)
END = bytes(1024)  # of a tar
READ = 1 << 20  # bytes of a read in order


def write(samples: Iterable[Sample], folder: str | Path, kind: str, *, per_shard: int = 1000) -> None:
    """Write shards of `per_shard` samples, then read each again for its index. The folder is complete or absent."""
    import webdataset

    with files.building(Path(folder).absolute()) as part:  # webdataset would run a relative path `pipe:…` as a command
        pattern = str(part).replace("%", "%%") + "/%05d.tar"
        with webdataset.ShardWriter(pattern, maxcount=per_shard, maxsize=2**62, verbose=0, mtime=0) as writer:
            for position, (key, label, data) in enumerate(checked(samples, kind)):
                members = {SUFFIXES[kind]: pack(kind, data), "json": {"key": key, "label": label}}
                writer.write({"__key__": f"{position:08d}"} | members)
        open_(part, index="build")


class Tar(Reader):
    """Sample i is the i-th of all shards in order. Indexes are read at opening, about 1 µs a sample.

    index="build" makes missing indexes, which reads those shards.

    Files are opened at the first read and stay open. `pread` uses no shared file position, so forked workers use their
    parent's descriptors; spawned workers open their own (`pickle` omits descriptors).
    """

    def __init__(self, folder: str | Path, *, index: str | None = None, **options) -> None:
        self._opened: dict[str, int] = {}  # file -> its descriptor
        check_choice((None, "build"), index=index)
        self.index = index
        super().__init__(folder, **options)

    def _open(self) -> None:
        stems = {file.stem for end in (".tar", ".index") for file in self.folder.glob(f"*{end}")}
        shards = [self.folder / f"{number:05d}.tar" for number in range(len(stems))]
        if not shards:
            raise FormatError(f"{self.folder}: no shards 00000.tar, …")
        tables = [_index_of(shard, self.index == "build") for shard in shards]
        rows = np.concatenate([entries.rows for entries in tables])  # (N,)
        self.files, self.kind, self.keys = list(map(str, shards)), tables[0].about["kind"], table.Keys(tables)
        self.offsets, self.sizes, self.labels, self.sums = (rows[name] for name in ("offset", "size", "label", "crc32"))
        self.starts = np.cumsum([0, *(len(entries.rows) for entries in tables)]).tolist()
        self.shards = [range(a, b) for a, b in itertools.pairwise(self.starts)]

    def file_of(self, position: int) -> str:
        return self.files[bisect.bisect_right(self.starts, position) - 1]

    def read(self, position: int) -> Sample:
        raw = self._pread(self.file_of(position), int(self.offsets[position]), int(self.sizes[position]))
        return self._sample(position, raw)

    def in_order(self, piece: range) -> Iterator[Sample]:
        """Reads of `READ` bytes or of one larger sample, and the samples in each."""
        file, starts = self.file_of(piece.start), self.offsets[piece.start : piece.stop]
        ends, at = starts + self.sizes[piece.start : piece.stop], 0
        while at < len(piece):
            base = int(starts[at])
            stop = max(int(np.searchsorted(ends, base + READ, side="right")), at + 1)
            block = memoryview(self._pread(file, base, int(ends[stop - 1]) - base))
            extents = zip((starts[at:stop] - base).tolist(), (ends[at:stop] - base).tolist(), strict=True)
            for position, (low, high) in enumerate(extents, piece.start + at):
                yield self._sample(position, block[low:high])
            at = stop

    def _pread(self, file: str, offset: int, size: int) -> bytes:
        if file not in self._opened:
            self._opened[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        raw = os.pread(self._opened[file], size, offset)
        if len(raw) != size:
            raise ValueError(f"truncated: {len(raw)} of {size} bytes at {offset} are there")
        return raw

    def close(self) -> None:
        for descriptor in self._opened.values():
            os.close(descriptor)
        self._opened.clear()

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict:
        return vars(self) | {"_opened": {}}


open_ = Tar


def _index_of(shard: Path, build: bool) -> table.Table:
    index = shard.with_suffix(".index")
    with naming(shard):
        size = shard.stat().st_size
        if build and not index.is_file():
            _build(shard, index)
    with naming(index), open(index, "rb") as stream:
        entries = table.read(stream, index.stat().st_size)
    if size != (expected := entries.about["bytes"]):
        raise FormatError(f"{shard}: truncated or changed: it has {size} bytes; its index says {expected} bytes")
    return entries


def _build(shard: Path, index: Path) -> None:
    """Reads the shard once, a sample at a time: the members of one name up to its first dot."""
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    try:
        with open(shard, "rb") as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                name, _, suffix = member.name.partition(".")
                samples.setdefault(name, {})[suffix] = member
            stream.seek(tar.offset)
            if stream.read(len(END)) != END:  # tarfile takes a damaged member for the end
                raise ValueError(f"truncated or damaged: neither a member nor the end mark at byte {tar.offset}")
            described = [_described(tar, name, members) for name, members in samples.items()]
    except tarfile.TarError as error:
        raise ValueError(f"truncated or damaged: {error}") from error
    if not described:
        raise ValueError("has no samples")
    kinds, entries = zip(*described, strict=True)
    files.write(index, table.pack({"kind": kinds[0], "bytes": shard.stat().st_size}, entries))


def _described(tar: tarfile.TarFile, name: str, members: dict[str, tarfile.TarInfo]) -> tuple[str, tuple]:
    """The kind of a sample, and its entry in the index."""
    try:
        about = json.load(tar.extractfile(members.pop("json")))
        ((suffix, member),) = members.items()
        data = tar.extractfile(member).read()
        label, key = operator.index(about["label"]), about["key"].encode()
        return KINDS[suffix], (member.offset_data, len(data), label, zlib.crc32(data), key)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        expected = f"one member .{', .'.join(KINDS)} and a .json with label and key"
        raise ValueError(f"{name!r} is no sample: expected {expected}") from error
