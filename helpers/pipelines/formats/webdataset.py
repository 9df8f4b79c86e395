"""Tar shards, written by the webdataset library, each with an index of ours.

    folder/00000.tar                    00000012.jpg, 00000012.json ({"key": …, "label": …}), 00000013.jpg, …
    folder/00000.idx.npz                arrays: each sample's offset, size, label, crc32 and key

Any tar reader reads a shard from its start. The index adds access to a sample by one `pread`, labels and keys without
reading a shard, a count to check a stream against, and a checksum. In order, one `pread` of 1 MiB serves all samples in
it, at some 3 µs a sample of Python; webdataset's reader parses two members a sample in Python, more than ten times as
much. On disk a sample takes two tar headers and one block for its json, 1.5 KiB, and up to half a KiB of padding.
"""

import io
import json
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from helpers.lab import files

from .dataset import KINDS, SUFFIXES, Keys, Sample, building, checked, pack, unpack
from .shards import Shards, Table

NEEDS = ("webdataset",)
INDEX = ".idx.npz"
VERSION = 2
BLOCK = 512  # bytes of a tar block
READ = 1 << 20  # bytes of a read in order
COLUMNS = {"offsets": np.int64, "sizes": np.int64, "labels": np.int64, "crc32": np.uint32}


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
    """`library` streams by webdataset's reader, which is checked against the index."""

    suffix, index_suffix = ".tar", INDEX

    def __init__(self, folder: str | Path, *, library: bool = False, **options) -> None:
        self.library = library
        super().__init__(folder, **options)

    def _open(self) -> None:
        super()._open()
        self.kind = str(self.tables[0]["kind"])
        self.labels, self.sums = self._column("labels", np.int64), self._column("crc32", np.uint32)
        self.keys = Keys.joined([(table["keys"], table["key_sizes"]) for table in self.tables])
        del self.tables

    def read_index(self, file: Path) -> Table:
        try:
            with np.load(file, allow_pickle=False) as stored:
                table = {name: stored[name] for name in stored.files}
            if table["version"] != VERSION:
                raise ValueError(f"version {table['version']}; this reads version {VERSION}")
            if str(table["kind"]) not in SUFFIXES or len({len(table[name]) for name in (*COLUMNS, "key_sizes")}) != 1:
                raise ValueError("columns of unequal length, or of an unknown kind")
        except (OSError, ValueError):
            raise
        except Exception as error:  # for a damaged archive: BadZipFile, EOFError, KeyError, NotImplementedError, …
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return table | {"bytes": int(table["bytes"])}

    def build_index(self, shard: Path) -> tuple[Table, str]:
        return build_index(shard)

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
                raw = next(rows)[SUFFIXES[self.kind]]
                if len(raw) != self.sizes[position]:
                    return
            except (StopIteration, KeyError, tarfile.TarError):
                return
            yield self._sample(position, raw)


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
                    row |= {"labels": labelled["label"], "keys": labelled["key"].encode()}
    except (tarfile.TarError, OSError, ValueError, KeyError, AttributeError) as error:
        why = str(error)
    complete = sorted((row for row in samples.values() if len(row) == len(COLUMNS) + 1), key=lambda row: row["offsets"])
    if not why:
        with open(shard, "rb") as stream:
            stream.seek(end)
            if stream.read(2 * BLOCK) != bytes(2 * BLOCK):
                why = f"no end mark at byte {end}"
            elif len(complete) < len(samples):
                why = "a sample without its json"
    table = {"version": VERSION, "kind": kind, "bytes": shard.stat().st_size}
    table |= {name: np.array([row[name] for row in complete], dtype) for name, dtype in COLUMNS.items()}
    keys = [row["keys"] for row in complete]
    table |= {"keys": np.frombuffer(b"".join(keys), np.uint8), "key_sizes": np.array([*map(len, keys)], np.int64)}
    if not why:
        stored = io.BytesIO()
        np.savez(stored, **table)
        files.write(shard.with_suffix(INDEX), stored.getvalue())
    return table, why
