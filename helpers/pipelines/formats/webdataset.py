"""Tar shards, as written by the webdataset library, each with an index of ours.

    folder/00000.tar                    00000012.jpg, 00000012.json ({"key": …, "label": …}), 00000013.jpg, …
    folder/00000.index                  each sample's offset, size, label, crc32 and key; see `table`

Any tar reader reads a shard from its start. The index adds access to a sample by one `pread`, labels and keys without
reading a shard, a count, and a checksum. In order, a sample costs some 3 µs of Python; webdataset's reader parses two
members a sample in Python, more than ten times as much. On disk a sample takes two tar headers and one block for its
json, 1.5 KiB, and up to half a KiB of padding.
"""

import json
import operator
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from ...lab import files
from . import table
from .dataset import KINDS, SUFFIXES, Sample, checked, pack
from .shards import Shards

NEEDS = ("webdataset",)
END = bytes(1024)  # of a tar


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


class Tar(Shards):
    suffix, index_suffix = ".tar", ".index"

    def _open(self) -> list[table.Table]:
        tables = super()._open()
        self.kind = tables[0].about["kind"]
        self.labels, self.sums, self.keys = self.rows["label"], self.rows["crc32"], table.Keys(tables)
        return tables

    def read_index(self, file: Path) -> table.Table:
        with open(file, "rb") as stream:
            return table.read(stream, file.stat().st_size)

    def build_index(self, shard: Path, index: Path) -> None:
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


open_ = Tar


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
