"""Tar shards, as written by the webdataset library, each with an index of ours.

    folder/00000.tar                    00000012.jpg, 00000012.json ({"key": …, "label": …}), 00000013.jpg, …
    folder/00000.index                  each sample's offset, size, label, crc32 and key; see `table`

Any tar reader reads a shard from its start. The index adds access to a sample by one `pread`, labels and keys without
reading a shard, a count to check a stream against, and a checksum. In order, a sample costs some 3 µs of Python;
webdataset's reader parses two members a sample in Python, more than ten times as much. On disk a sample takes two tar
headers and one block for its json, 1.5 KiB, and up to half a KiB of padding.

Shards of others are read with index="build", under any names: a sample is the files of one name up to the first dot
after its folder, with one of `jpg`, `jpeg`, `npy` and `png`, and a label in `cls` or `json`, or where `label_from`
says. The key is the JSON's `key`, else that name. A PNG beside a JPEG or an array is taken for a mask and not read.
Links, sparse files and other members that aren't plain files are faults.
"""

import contextlib
import functools
import io
import json
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from . import table
from .dataset import KINDS, Fault, FormatError, Sample, building, checked, pack, suffix_of
from .shards import Shards

NEEDS = ("webdataset",)
BLOCK = 512  # bytes of a tar block
LONGEST = 1 << 14  # bytes of a member's header, with its name and attributes
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
    """`library` streams by webdataset's reader, which is checked against the index, but trusts the headers of a tar.

    `label_from`, with index="build", is where shards of others have their labels: a member's suffix, whose text is an
    integer ("cls"), or a field of the JSON ("json.category_id"). Without it: `cls`, else the JSON's `label`.
    """

    suffix, index_suffix = ".tar", ".index"
    compressed = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")

    def __init__(self, folder: str | Path, *, library: bool = False, label_from: str | None = None, **options) -> None:
        self.library, self.label_from = library, label_from
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
            entries = table.read(stream, file.stat().st_size)
        if self.label_from not in (None, source := entries.about.get("label_from")):
            raise ValueError(f"labels are from {source!r}, not {self.label_from!r}; delete it to have it made anew")
        return entries

    def build_index(self, shard: Path) -> tuple[table.Table, bytes, str]:
        """Reads headers, then each sample's members once; only one sample is in memory."""
        samples, faults, cut = _scan(shard)
        read, entries, kinds = functools.partial(self._pread, str(shard)), [], set()
        for name, members in samples.items():
            try:
                suffix = _data_suffix(members)
                label, key = _label(members, read, self.label_from)
                key = (name if key is None else key).encode()
            except ValueError as error:
                faults.append(f"sample {name!r} {error}")
                continue
            kinds.add(KINDS[suffix])
            entries.append((*members[suffix], label, zlib.crc32(read(*members[suffix])), key))
        if len(kinds) > 1:
            raise ValueError(f"has samples of {' and '.join(sorted(kinds))}; all must be of one kind")
        more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
        reason = f"{faults[0]}{more}; what has a fault is left out" if faults else ""
        if cut:
            reason = f"truncated or damaged ({cut}); what comes after its first {len(entries)} samples is lost"
        about = {"kind": next(iter(kinds), "image"), "bytes": shard.stat().st_size, "label_from": self.label_from}
        entries = table.made(about, sorted(entries))
        return entries, table.pack(entries), reason

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


class _Headers(io.FileIO):
    """A tar for reading its headers alone. One that claims to be huge is refused before memory is taken for it."""

    def read(self, size: int = -1, /) -> bytes:
        if not 0 <= size <= LONGEST:
            raise ValueError(f"a header of {size} bytes")
        return super().read(size)


def _scan(shard: Path) -> tuple[dict[str, Members], list[str], str]:
    """Samples (name -> suffix -> offset and size), faults of single members, and why reading stopped early, or "".

    No header is trusted: sizes are held against the file's before anything of that size is read.
    """
    samples: dict[str, Members] = {}
    faults, cut, end, whole = {}, "", 0, shard.stat().st_size
    try:
        with _Headers(shard) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # 1 KB each
                if member.size < 0 or tar.offset < member.offset_data:
                    raise ValueError(f"member {member.name!r} has {member.size} bytes")
                name, suffix = _split(member.name)
                if suffix and not member.isdir():
                    if member.issparse() or not member.isreg():
                        faults[name] = f"member {member.name!r} is a link, a device or a sparse file"
                    elif member.offset_data + member.size > whole:
                        raise ValueError(f"member {member.name!r} has {member.size} bytes, beyond the end of the file")
                    elif suffix in samples.setdefault(name, {}):
                        faults[name] = f"member {member.name!r} is there twice"
                    else:
                        samples[name][suffix] = (member.offset_data, member.size)
                end = tar.offset
            stream.seek(end)
            if stream.read(2 * BLOCK) != bytes(2 * BLOCK):
                cut = f"no end mark at byte {end}"
    except Exception as error:  # for damaged headers: TarError, OSError, ValueError, RecursionError, OverflowError, …
        cut = str(error) or type(error).__name__
    return {name: members for name, members in samples.items() if name not in faults}, [*faults.values()], cut


def _split(name: str) -> tuple[str, str]:
    """Key and suffix, split at the first dot of the base name; both "" for a hidden file, or one without a dot."""
    folder, slash, base = name.removeprefix("./").rpartition("/")
    stem, _, suffix = base.partition(".")
    return (folder + slash + stem, suffix.lower()) if stem and suffix else ("", "")


def _data_suffix(members: Members) -> str:
    """The suffix of the one image or array among a sample's files."""
    suffixes = [suffix for suffix in members if suffix in KINDS]
    if len(suffixes) == 2 and "png" in suffixes:
        suffixes.remove("png")
    if len(suffixes) != 1:
        raise ValueError(f"has {len(suffixes) or 'no'} members of .{', .'.join(KINDS)}")
    return suffixes[0]


def _label(members: Members, read: Callable[[int, int], bytes], label_from: str | None) -> tuple[int, str | None]:
    """The label of a sample, and the key, if the JSON that was read for the label has one."""
    source = label_from or ("cls" if "cls" in members else "json")
    suffix, _, field = source.partition(".") if source.startswith("json") else (source, "", "")
    if suffix not in members:
        expected = f"no .{suffix}" if label_from else "no .cls or .json; label_from= names another member"
        raise ValueError(f"has no label: {expected}")
    try:
        content = read(*members[suffix])
        about = json.loads(content) if suffix == "json" else {"label": int(content)}
        label, key = about[field or "label"], about.get("key")
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"has no label in .{source} ({reason}); label_from= names another place") from error
    if type(label) is not int or not -(2**63) <= label < 2**63:
        raise ValueError(f"has a label in .{source} that is no 64-bit integer")
    return label, key if isinstance(key, str) else None
