"""Tar shards, written by the webdataset library, each with an index of ours.

    folder/00000.tar                    00000012.jpg, 00000012.json ({"key": …, "label": …}), 00000013.jpg, …
    folder/00000.idx.npz                arrays: each sample's offset, size, label, crc32 and key

Any tar reader reads a shard from its start. The index adds access to a sample by one `pread`, labels and keys without
reading a shard, a count to check a stream against, and a checksum. In order, one `pread` of 1 MiB serves all samples in
it, at some 3 µs a sample of Python; webdataset's reader parses two members a sample in Python, more than ten times as
much. On disk a sample takes two tar headers and one block for its json, 1.5 KiB, and up to half a KiB of padding.

Shards of others are read with index="build", under any names: a sample is the files of one name up to the first dot
after its folder, with one of `jpg`, `jpeg`, `npy` and `png`, and a label in `cls` or `json`, or where `label_from`
says. The key is the JSON's `key`, else that name. A PNG beside a JPEG or an array is taken for a mask and not read.
Links, sparse files and other members that aren't plain files are faults.
"""

import contextlib
import io
import json
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from .dataset import KINDS, SUFFIXES, Fault, FormatError, Keys, Sample, building, checked, pack, suffix_of, unpack
from .shards import Shards, Table, save_index

NEEDS = ("webdataset",)
INDEX = ".idx.npz"
VERSION = 2
BLOCK = 512  # bytes of a tar block
READ = 1 << 20  # bytes of a read in order
LONGEST = 1 << 14  # bytes of a member's header, with its name and attributes
COLUMNS = {"offsets": np.int64, "sizes": np.int64, "labels": np.int64, "crc32": np.uint32}
Members = dict[str, tuple[int, int]]  # a sample's files: suffix -> offset and size


def write(samples: Iterable[Sample], folder: str | Path, kind: str, *, per_shard: int = 1000) -> None:
    """Write shards of `per_shard` samples, then read each again for its index. The folder is complete or absent."""
    import webdataset

    with building(Path(folder).absolute()) as part:  # webdataset would run a relative path `pipe:…` as a command
        pattern = str(part).replace("%", "%%") + "/%05d.tar"
        with webdataset.ShardWriter(pattern, maxcount=per_shard, maxsize=2**62, verbose=0, mtime=0) as writer:
            for position, sample in enumerate(checked(samples, kind)):
                about = {"key": sample.key, "label": sample.label}
                row = {
                    "__key__": f"{position:08d}",
                    suffix_of(kind, sample.data): pack(kind, sample.data),
                    "json": about,
                }
                writer.write(row)
        for shard in sorted(part.glob("*.tar")):
            build_index(shard)


class Tar(Shards):
    """`library` streams by webdataset's reader, which is checked against the index, but trusts the headers of a tar.

    `label_from`, with index="build", is where shards of others have their labels: a member's suffix, whose text is an
    integer ("cls"), or a field of the JSON ("json.category_id"). Without it: `cls`, else the JSON's `label`.
    """

    suffix, index_suffix = ".tar", INDEX

    def __init__(self, folder: str | Path, *, library: bool = False, label_from: str | None = None, **options) -> None:
        self.library, self.label_from = library, label_from
        super().__init__(folder, **options)

    def _open(self) -> None:
        super()._open()
        kinds = {str(table["kind"]) for table in self.tables if len(table["offsets"])}
        if len(kinds) > 1:
            reason = f"has shards of {' and of '.join(sorted(kinds))}; a data set has one kind"
            raise FormatError(Fault(str(self.folder), None, reason))
        self.kind = kinds.pop()
        self.suffixes = [suffix for suffix, kind in KINDS.items() if kind == self.kind]
        self.labels, self.sums = self._column("labels", np.int64), self._column("crc32", np.uint32)
        self.keys = Keys.joined([(table["keys"], table["key_sizes"]) for table in self.tables])
        del self.tables

    def read_index(self, file: Path) -> Table:
        try:
            with np.load(file, allow_pickle=False) as stored:
                if sum(member.file_size for member in stored.zip.infolist()) > file.stat().st_size:
                    raise ValueError("it is compressed, and would take more memory than its size")
                table = {name: stored[name] for name in stored.files}
            if table["version"] != VERSION:
                raise ValueError(f"version {table['version']}; this reads version {VERSION}")
            if str(table["kind"]) not in SUFFIXES or len({len(table[name]) for name in (*COLUMNS, "key_sizes")}) != 1:
                raise ValueError("columns of unequal length, or of an unknown kind")
            if (table["key_sizes"] < 0).any() or table["key_sizes"].sum() != len(table["keys"]):
                raise ValueError("its keys have other sizes than it says")
            if self.label_from not in (None, made := str(table.get("label_from", ""))):
                raise ValueError(f"labels are from {made!r}, not {self.label_from!r}; delete it to have it made anew")
        except (OSError, ValueError):
            raise
        except Exception as error:  # for a damaged archive: BadZipFile, EOFError, KeyError, NotImplementedError, …
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return table | {"bytes": int(table["bytes"])}

    def build_index(self, shard: Path) -> tuple[Table, str]:
        return build_index(shard, self.label_from)

    def read(self, position: int) -> Sample:
        return self._sample(position, self._raw(position))

    def _sample(self, position: int, raw: bytes | memoryview) -> Sample:
        self._check(raw, self.sums[position])
        return Sample(self.keys[position], int(self.labels[position]), unpack(self.kind, raw))

    def from_shard(self, file: str, piece: range) -> Iterator[Sample]:
        return self._by_webdataset(file, piece) if self.library else self._in_blocks(file, piece)

    def _in_blocks(self, file: str, piece: range) -> Iterator[Sample]:
        """Reads of `READ` bytes or of one larger sample, and the samples in each."""
        starts = self.offsets[piece.start : piece.stop]
        ends, at = starts + self.sizes[piece.start : piece.stop], 0
        while at < len(piece):
            base = int(starts[at])
            stop = max(int(np.searchsorted(ends, base + READ, side="right")), at + 1)
            block = memoryview(self._pread(file, base, int(ends[stop - 1]) - base))
            places = zip((starts[at:stop] - base).tolist(), (ends[at:stop] - base).tolist(), strict=True)
            for position, (low, high) in enumerate(places, piece.start + at):
                if high > len(block):
                    return
                yield self._sample(position, block[low:high])
            at = stop

    def _by_webdataset(self, file: str, piece: range) -> Iterator[Sample]:
        """By webdataset's reader, until it fails or disagrees with the index.

        Without an index, a shard that is truncated between samples, or has a damaged header, would end silently.
        """
        import webdataset

        if self._locate(piece.start)[1]:  # it can only start with a shard
            return
        stages = {"shardshuffle": False, "nodesplitter": None, "workersplitter": None, "empty_check": False}
        rows = iter(webdataset.WebDataset([file], **stages))
        for position in piece:
            try:
                row = next(rows)
            except (StopIteration, tarfile.TarError):
                return
            raw = next((row[suffix] for suffix in self.suffixes if suffix in row), None)
            if raw is None or len(raw) != self.sizes[position]:
                return
            yield self._sample(position, raw)


open_ = Tar


def build_index(shard: Path, label_from: str | None = None) -> tuple[Table, str]:
    """See `Shards.build_index`. A shard of others needs no index: see `_row` for what a sample must have.

    Reads headers, then each sample's members once; holds one sample in memory.
    """
    samples, faults, cut = _scan(shard)
    rows: list[dict] = []
    with open(shard, "rb") as stream:

        def content(offset: int, size: int) -> bytes:
            stream.seek(offset)
            return stream.read(size)

        for name, members in samples.items():
            try:
                rows.append(_row(name, members, content, label_from))
            except ValueError as error:
                faults.append(f"sample {name!r} {error}")
    rows.sort(key=lambda row: row["offsets"])
    if len(kinds := {row["kind"] for row in rows}) > 1:
        raise ValueError(f"has samples of {' and '.join(sorted(kinds))}; all must be of one kind")
    more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
    why = f"{faults[0]}{more}; what has a fault is left out" if faults else ""
    if cut:
        why = f"truncated or damaged ({cut}); what comes after its first {len(rows)} samples is lost"
    table = {"version": VERSION, "kind": next(iter(kinds), "image"), "bytes": shard.stat().st_size}
    table |= {name: np.array([row[name] for row in rows], dtype) for name, dtype in COLUMNS.items()}
    keys = [row["keys"] for row in rows]
    table |= {"keys": np.frombuffer(b"".join(keys), np.uint8), "key_sizes": np.array([*map(len, keys)], np.int64)}
    if not why:
        stored = io.BytesIO()
        np.savez(stored, label_from=label_from or "", **table)
        save_index(shard.with_suffix(INDEX), stored.getvalue())
    return table, why


class _Headers(io.FileIO):
    """A tar for reading its headers alone. One that claims to be huge is refused before memory is taken for it."""

    def read(self, size: int = -1, /) -> bytes:
        if not 0 <= size <= LONGEST:
            raise ValueError(f"a header of {size} bytes")
        return super().read(size)


def _scan(shard: Path) -> tuple[dict[str, Members], list[str], str]:
    """Samples (key -> suffix -> offset and size), faults of single members, and why reading stopped early, or "".

    No header is trusted: sizes are held against the file's before anything of that size is read.
    """
    samples: dict[str, Members] = {}
    faults, spoiled, cut, end, whole = [], set(), "", 0, shard.stat().st_size
    try:
        with _Headers(shard) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # 1 KB each
                if member.size < 0 or tar.offset < member.offset_data:
                    raise ValueError(f"member {member.name!r} has {member.size} bytes")
                name, suffix = _split(member.name)
                if suffix and not member.isdir():
                    if fault := _member_fault(member, suffix in samples.get(name, ())):
                        faults.append(f"member {member.name!r} {fault}")
                        spoiled.add(name)
                    elif member.offset_data + member.size > whole:
                        raise ValueError(f"member {member.name!r} has {member.size} bytes, beyond the end of the file")
                    else:
                        samples.setdefault(name, {})[suffix] = (member.offset_data, member.size)
                end = tar.offset
            stream.seek(end)
            if stream.read(2 * BLOCK) != bytes(2 * BLOCK):
                cut = f"no end mark at byte {end}"
    except Exception as error:  # for damaged headers: TarError, OSError, ValueError, RecursionError, OverflowError, …
        cut = str(error) or type(error).__name__
    return {name: members for name, members in samples.items() if name not in spoiled}, faults, cut


def _split(name: str) -> tuple[str, str]:
    """Key and suffix, split at the first dot of the base name; both "" for a hidden file, or one without a dot."""
    folder, slash, base = name.removeprefix("./").rpartition("/")
    stem, _, suffix = base.partition(".")
    return (folder + slash + stem, suffix.lower()) if stem and suffix else ("", "")


def _member_fault(member: tarfile.TarInfo, doubled: bool) -> str:
    """Why a member cannot be a part of a sample, or ""."""
    if member.issparse():
        return f"is sparse: it would take {member.size} bytes"
    if not member.isreg():
        return "is a link or a device, not a file"
    if member.name.startswith("/") or ".." in member.name.split("/"):
        return "lies outside of its folder"
    return "is there twice" if doubled else ""


def _row(name: str, members: Members, content: Callable[[int, int], bytes], label_from: str | None) -> dict:
    """The columns of a sample, and its kind. It needs one image or array, and a label; else a ValueError says what."""
    suffixes = [suffix for suffix in members if suffix in KINDS]
    if len(suffixes) == 2 and "png" in suffixes:
        suffixes.remove("png")
    if len(suffixes) != 1:
        raise ValueError(f"has {len(suffixes) or 'no'} members of .{', .'.join(KINDS)}")
    label, key = _label(members, content, label_from)
    offset, size = members[suffixes[0]]
    columns = {"offsets": offset, "sizes": size, "labels": label, "crc32": zlib.crc32(content(offset, size))}
    return columns | {"keys": (name if key is None else key).encode(), "kind": KINDS[suffixes[0]]}


def _label(members: Members, content: Callable[[int, int], bytes], label_from: str | None) -> tuple[int, str | None]:
    """The label of a sample, and the key, if the JSON that was read for the label has one."""
    source, key = label_from or ("cls" if "cls" in members else "json"), None
    suffix, _, field = source.partition(".") if source.startswith("json") else (source, "", "")
    if suffix not in members:
        expected = f"no .{suffix}" if label_from else "no .cls or .json; label_from= names another member"
        raise ValueError(f"has no label: {expected}")
    label = content(*members[suffix])
    if suffix == "json":
        about, field = _json(label), field or "label"
        if field not in about:
            raise ValueError(f'has no label: no "{field}" in its .json; label_from="json.FIELD" names another')
        label, key = about[field], about.get("key")
    elif len(label) <= 40:
        with contextlib.suppress(ValueError):  # what is no number is refused below
            label = int(label)
    if type(label) is not int or not -(2**63) <= label < 2**63:
        raise ValueError(f"has a label in .{source} that is no 64-bit integer")
    return label, key if isinstance(key, str) else None


def _json(text: bytes) -> dict:
    try:
        about = json.loads(text)
    except RecursionError:
        raise ValueError("has a .json that is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"has a .json that cannot be read ({error})") from error
    if not isinstance(about, dict):
        raise ValueError(f"has a .json that is a {type(about).__name__}, not an object")
    return about
