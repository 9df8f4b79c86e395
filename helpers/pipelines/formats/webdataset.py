"""Tar shards, as written by the webdataset library, each with an index of ours.

    folder/00000.tar                    00000012.jpg, 00000012.json ({"key": …, "label": …}), 00000013.jpg, …
    folder/00000.index                  each sample's offset, size, label, crc32 and key; see `table`

Any tar reader reads a shard from its start. The index adds access to a sample by one `pread`, labels and keys without
reading a shard, a count to check a stream against, and a checksum. In order, a sample costs some 3 µs of Python;
webdataset's reader parses two members a sample in Python, more than ten times as much. On disk a sample takes two tar
headers and one block for its json, 1.5 KiB, and up to half a KiB of padding.

Shards of others are read with index="build", under any names: a sample is the files of one name up to the first dot
after its folder, with one of `jpg`, `jpeg`, `npy` and `png`, and a label in `cls` or as the JSON's `label`. The key is
the JSON's `key`, else that name. Links and other members that aren't plain files are not read.
"""

import contextlib
import json
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import table
from .dataset import KINDS, Fault, FormatError, Sample, building, checked, pack, suffix_of
from .shards import Shards

NEEDS = ("webdataset",)
BLOCK = 512  # bytes of a tar block
Members = dict[str, tuple[int, int]]  # a sample's files: suffix -> offset and size


def write(samples: Iterable[Sample], folder: str | Path, kind: str, *, per_shard: int = 1000) -> None:
    """Write shards of `per_shard` samples, then read each again for its index. The folder is complete or absent."""
    import webdataset

    with building(Path(folder).absolute()) as part:  # webdataset would run a relative path `pipe:…` as a command
        pattern = str(part).replace("%", "%%") + "/%05d.tar"
        with webdataset.ShardWriter(pattern, maxcount=per_shard, maxsize=2**62, verbose=0, mtime=0) as writer:
            for position, (key, label, data) in enumerate(checked(samples, kind)):
                members = {suffix_of(kind, data): pack(kind, data), "json": {"key": key, "label": label}}
                writer.write({"__key__": f"{position:08d}"} | members)
        open_(part, index="build")


class Tar(Shards):
    """`library` streams by webdataset's reader, which is checked against the index, but trusts the headers of a tar."""

    suffix, index_suffix = ".tar", ".index"
    compressed = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")

    def __init__(self, folder: str | Path, *, library: bool = False, **options) -> None:
        self.library = library
        super().__init__(folder, **options)

    def _open(self) -> None:
        tables = super()._open()
        kinds = {entries.about["kind"] for entries in tables if len(entries.rows)}
        if len(kinds) > 1:
            reason = f"has shards of {' and of '.join(sorted(kinds))}; a data set has one kind"
            raise FormatError(Fault(str(self.folder), None, reason))
        (self.kind,) = kinds
        self.labels, self.sums, self.keys = self.rows["label"], self.rows["crc32"], table.Keys(tables)

    def read_index(self, file: Path) -> table.Table:
        with open(file, "rb") as stream:
            return table.read(stream, file.stat().st_size)

    def build_index(self, shard: Path) -> tuple[table.Table, bytes, str]:
        """Reads headers, then each sample's members once; only one sample is in memory."""
        samples, cut = _scan(shard)
        faults, entries, kinds = [], [], set()
        for name, members in samples.items():
            try:
                suffix, label, key = self._described(shard, name, members)
            except ValueError as error:
                faults.append(f"sample {name!r} {error}")
                continue
            kinds.add(KINDS[suffix])
            crc32 = zlib.crc32(self._pread(str(shard), *members[suffix]))
            entries.append((*members[suffix], label, crc32, key.encode()))
        if len(kinds) > 1:
            raise ValueError(f"has samples of {' and '.join(sorted(kinds))}; all must be of one kind")
        more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
        reason = f"{faults[0]}{more}; what has a fault is left out" if faults else ""
        if cut:
            reason = f"truncated or damaged ({cut}); what comes after its first {len(entries)} samples is lost"
        about = {"kind": next(iter(kinds), "image"), "bytes": shard.stat().st_size}
        entries = table.made(about, sorted(entries))
        return entries, table.pack(entries), reason

    def _described(self, shard: Path, name: str, members: Members) -> tuple[str, int, str]:
        """The suffix of a sample's image or array, its label, and its key."""
        suffixes = [suffix for suffix in members if suffix in KINDS]
        if len(suffixes) != 1:
            raise ValueError(f"has {len(suffixes) or 'no'} members of .{', .'.join(KINDS)}")
        source = next((suffix for suffix in ("cls", "json") if suffix in members), None)
        if source is None:
            raise ValueError("has no label: no .cls or .json")
        try:
            about = json.loads(self._pread(str(shard), *members[source]))
            about = {"label": about} if source == "cls" else about
            label, key = about["label"], about.get("key", name)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"has no label in .{source} ({type(error).__name__}: {error})") from error
        if type(label) is not int or not -(2**63) <= label < 2**63 or not isinstance(key, str):
            raise ValueError(f"has a label in .{source} that is no 64-bit integer, or a key that is no text")
        return suffixes[0], label, key

    def in_order(self, piece: range) -> Iterator[Sample]:
        return self._by_webdataset(piece) if self.library else super().in_order(piece)

    def _by_webdataset(self, piece: range) -> Iterator[Sample]:
        """By webdataset's reader, until it fails or disagrees with the index.

        Without an index, a shard that is truncated between samples, or has a damaged header, would end silently.
        """
        import webdataset

        file, first = self._locate(piece.start)
        if first:  # it can only start with a shard
            return
        stages = {"shardshuffle": False, "nodesplitter": None, "workersplitter": None, "empty_check": False}
        rows = webdataset.WebDataset([file], **stages)
        with contextlib.suppress(tarfile.TarError):
            for position, row in zip(piece, rows, strict=False):
                raw = next((row[suffix] for suffix, kind in KINDS.items() if kind == self.kind and suffix in row), b"")
                if len(raw) != self.sizes[position]:
                    return
                yield self._sample(position, raw)


open_ = Tar


def _scan(shard: Path) -> tuple[dict[str, Members], str]:
    """Samples (name -> suffix -> offset and size), and why reading stopped early, or ""."""
    samples: dict[str, Members] = {}
    cut, end, whole = "", 0, shard.stat().st_size
    try:
        with open(shard, "rb") as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # 1 KB each
                if member.offset_data + member.size > whole:
                    raise ValueError(f"member {member.name!r} has {member.size} bytes, beyond the end of the file")
                name, suffix = _split(member.name)
                if suffix and member.isreg() and not member.issparse():
                    samples.setdefault(name, {})[suffix] = (member.offset_data, member.size)
                end = tar.offset
            stream.seek(end)
            if stream.read(2 * BLOCK) != bytes(2 * BLOCK):
                cut = f"no end mark at byte {end}"
    except (tarfile.TarError, OSError, ValueError) as error:
        cut = str(error)
    return samples, cut


def _split(name: str) -> tuple[str, str]:
    """Key and suffix, split at the first dot of the base name; both "" for a hidden file, or one without a dot."""
    folder, slash, base = name.removeprefix("./").rpartition("/")
    stem, _, suffix = base.partition(".")
    return (folder + slash + stem, suffix.lower()) if stem and suffix else ("", "")
