"""Tar shards, written and read by the webdataset library, each with our index.

    folder/00000.tar                    00000012.jpg, 00000012.json ({"key": …, "label": …}), 00000013.jpg, …
    folder/00000.idx.json               each sample's offset, size, label, key and crc32

A shard is read sequentially; tar has no random access. The index adds access to any sample by one `pread`, labels and
keys without reading a shard, a count to check a stream against, and a checksum. On disk a sample takes two tar headers
and one block for its json, 1.5 KiB, and up to half a KiB of padding.
"""

import json
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from helpers.lab import files

from .dataset import KINDS, SUFFIXES, Sample, building, checked, pack, unpack
from .shards import Shards, Table

NEEDS = ("webdataset",)
INDEX = ".idx.json"
VERSION = 1
BLOCK = 512  # bytes of a tar block
COLUMNS = ("offsets", "sizes", "labels", "keys", "crc32")


def write(samples: Iterable[Sample], folder: str | Path, kind: str, *, per_shard: int = 1000) -> None:
    """Write shards of `per_shard` samples, then read each again for its index. The folder is complete or absent."""
    import webdataset

    with building(folder) as part:
        pattern = str(part).replace("%", "%%") + "/%05d.tar"
        with webdataset.ShardWriter(pattern, maxcount=per_shard, maxsize=2**62, verbose=0, mtime=0) as writer:
            for position, sample in enumerate(checked(samples, kind)):
                about = {"key": sample.key, "label": sample.label}
                row = {"__key__": f"{position:08d}", SUFFIXES[kind]: pack(kind, sample.data), "json": about}
                writer.write(row)
        for shard in sorted(part.glob("*.tar")):
            build_index(shard)


class Tar(Shards):
    """`by_index` streams without webdataset's reader, by one `pread` a sample.

    That reader parses tar in Python, two members a sample, which takes several times as long as reading a few kB from
    the disk.
    """

    suffix, index_suffix = ".tar", INDEX

    def __init__(self, folder: str | Path, *, by_index: bool = False, **options) -> None:
        self.by_index = by_index
        super().__init__(folder, **options)

    def _open(self) -> None:
        super()._open()
        self.kind = self.tables[0]["kind"]
        self.labels, self.sums = self._column("labels", np.int64), self._column("crc32", np.uint32)
        self.keys = [key for table in self.tables for key in table["keys"]]
        del self.tables

    def read_index(self, file: Path) -> Table:
        try:
            table = json.loads(file.read_bytes())
            if table["version"] != VERSION:
                raise ValueError(f"version {table['version']!r}; this reads version {VERSION}")
            if table["kind"] not in SUFFIXES or len({len(table[name]) for name in COLUMNS}) != 1:
                raise ValueError("columns of unequal length, or of an unknown kind")
        except (KeyError, TypeError) as error:
            raise ValueError(f"without {error}") from error
        return table

    def build_index(self, shard: Path) -> tuple[Table, str]:
        return build_index(shard)

    def read(self, position: int) -> Sample:
        return self._sample(position, self._raw(position))

    def _sample(self, position: int, raw: bytes) -> Sample:
        self._check(raw, self.sums[position])
        return Sample(self.keys[position], int(self.labels[position]), unpack(self.kind, raw))

    def from_shard(self, file: str, piece: range) -> Iterator[Sample]:
        """By webdataset's reader, until it fails or disagrees with the index.

        Without an index, a shard that is truncated between samples, or has a damaged header, would end silently.
        """
        import webdataset

        if self.by_index:
            return
        stages = {"shardshuffle": False, "nodesplitter": None, "workersplitter": None, "empty_check": False}
        rows = iter(webdataset.WebDataset([file], **stages))
        for position in piece:
            try:
                raw = next(rows)[SUFFIXES[self.kind]]
                if len(raw) != self.sizes[position]:
                    return
                sample = self._sample(position, raw)
            except (StopIteration, KeyError, OSError, ValueError, tarfile.TarError):
                return
            yield sample


open_ = Tar


def build_index(shard: Path) -> tuple[Table, str]:
    """See `Shards.build_index`."""
    samples: dict[str, dict] = {}  # member name -> columns read so far
    kind, end, why = "image", 0, ""
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                name, _, suffix = member.name.partition(".")
                raw = tar.extractfile(member).read()
                end = member.offset_data + -(-member.size // BLOCK) * BLOCK
                row = samples.setdefault(name, {})
                if suffix in KINDS:
                    kind = KINDS[suffix]
                    row |= {"offsets": member.offset_data, "sizes": len(raw), "crc32": zlib.crc32(raw)}
                elif suffix == "json":
                    labelled = json.loads(raw)
                    row |= {"labels": labelled["label"], "keys": labelled["key"]}
    except (tarfile.TarError, OSError, ValueError, KeyError, AttributeError) as error:
        why = str(error)
    complete = [row for row in samples.values() if len(row) == len(COLUMNS)]
    if not why:
        with open(shard, "rb") as stream:
            stream.seek(end)
            if stream.read(2 * BLOCK) != bytes(2 * BLOCK):
                why = f"no end mark at byte {end}"
            elif len(complete) < len(samples):
                why = "a sample without its json"
    table = {"version": VERSION, "kind": kind, "bytes": shard.stat().st_size}
    table |= {name: [row[name] for row in complete] for name in COLUMNS}
    if not why:
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False)
        files.write(shard.with_suffix(INDEX), text)
    return table, why
