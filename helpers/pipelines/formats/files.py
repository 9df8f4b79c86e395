"""Many small files: one a sample, in a folder for each label, and a table of them.

    folder/labels.csv                   file, label, key, bytes, crc32: one line a sample, in order
    folder/7/00000012.jpg               sample 12, of label 7; .npy for tokens

Costs an open, a read and a close for every sample (three system calls, and cold the inode and the folder's block
besides), and on disk a whole block for what is left over of each file: half a block, 2 KiB, on average. In return any
tool can look at a sample, replace it or delete it.
"""

import csv
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from helpers.text.files import replacing

from .reader import Reader
from .sample import SUFFIXES, Fault, FormatError, Sample, allowed, building, checked, pack, unpack

TABLE = "labels.csv"
COLUMNS = ("file", "label", "key", "bytes", "crc32")
SHARD = 1000  # places that a stream shuffles and hands to a worker together: files have no shards of their own
KINDS = {f".{suffix}": kind for kind, suffix in SUFFIXES.items()}


def obstacle() -> str:
    return ""


def write(samples: Iterable[Sample], folder: str | Path, kind: str) -> None:
    """Write each sample to a file of its own. The folder is whole, or absent."""
    with building(folder) as part, open(part / TABLE, "w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream, quoting=csv.QUOTE_NONNUMERIC)
        table.writerow(COLUMNS)
        for place, sample in enumerate(checked(samples, kind)):
            name = f"{sample.label}/{place:08d}.{SUFFIXES[kind]}"
            raw = pack(kind, sample.data)
            (part / name).parent.mkdir(exist_ok=True)
            (part / name).write_bytes(raw)
            table.writerow([name, sample.label, sample.key, len(raw), zlib.crc32(raw)])


def open_(
    folder: str | Path,
    *,
    faults: str = "refuse",
    check_image: bool = False,
    verify: bool = True,
    index: str | None = None,
) -> Reader:
    """Reads the table, about 2 µs a sample; a file is opened when its sample is read.

    `verify` checks every sample's crc32, and is what finds a flipped bit. index="build" makes a missing table of the
    files that there are, which reads them all; their keys are then their names, for only the table knew others.
    """
    allowed("index", index, (None, "build"))
    return Reader(Files(Path(folder), verify, index), faults, check_image)


class Files:
    """Sample i is line i of the table."""

    def __init__(self, folder: Path, verify: bool, index: str | None) -> None:
        self.folder, self.verify, self.faults = folder, verify, []
        table = folder / TABLE
        if not table.is_file():
            if index != "build":
                raise FormatError(Fault(str(table), None, 'no such table of the samples; index="build" makes one'))
            build_index(folder)
        rows = _read_table(table)
        self.names, labels, self.keys, sizes, sums = zip(*rows, strict=True)
        self.labels = np.array(labels, np.int64)
        self.sizes, self.sums = np.array(sizes, np.int64), np.array(sums, np.uint32)
        self.kind = KINDS[os.path.splitext(self.names[0])[1]]
        self.shards = [range(at, min(at + SHARD, len(rows))) for at in range(0, len(rows), SHARD)]

    def file_of(self, place: int) -> str:
        return os.path.join(self.folder, self.names[place])

    def read(self, place: int) -> Sample:
        file = self.file_of(place)
        try:
            with open(file, "rb", buffering=0) as stream:
                raw = stream.read()
            if len(raw) != self.sizes[place]:
                raise ValueError(f"has {len(raw)} bytes; the table says {self.sizes[place]}")
            if self.verify and zlib.crc32(raw) != self.sums[place]:
                raise ValueError("its crc32 is another than the table's: the content changed")
            return Sample(self.keys[place], int(self.labels[place]), unpack(self.kind, raw))
        except OSError as error:
            raise FormatError(Fault(file, place, f"cannot be read ({error.strerror})")) from error
        except ValueError as error:
            raise FormatError(Fault(file, place, str(error))) from error

    def run(self, piece: range) -> Iterator[Sample]:
        return iter(())  # one by one is the only way

    def close(self) -> None:
        pass  # no file stays open


def build_index(folder: Path) -> None:
    """Make the table of the files in folders by label; keys are file names. Reads every file."""
    found = [file for suffix in KINDS for file in folder.glob(f"*/*{suffix}")]
    if not found:
        raise FormatError(Fault(str(folder), None, "no samples; expected LABEL/NAME.jpg or LABEL/NAME.npy"))
    with replacing(folder / TABLE) as raw_stream:
        lines = [COLUMNS]
        for file in sorted(found, key=lambda file: file.name):
            raw = file.read_bytes()
            name = file.relative_to(folder).as_posix()
            lines.append((name, int(file.parent.name), file.stem, len(raw), zlib.crc32(raw)))
        raw_stream.write("".join(f'"{a}",{b},"{c}",{d},{e}\r\n' for a, b, c, d, e in lines).encode())


def _read_table(table: Path) -> list[tuple[str, int, str, int, int]]:
    try:
        with open(table, newline="", encoding="utf-8") as stream:
            lines = csv.reader(stream)
            if tuple(next(lines, ())) != COLUMNS:
                raise ValueError(f"no such columns; expected {', '.join(COLUMNS)}")
            rows = [(name, int(label), key, int(size), int(crc)) for name, label, key, size, crc in lines]
        if not rows or any(os.path.splitext(row[0])[1] not in KINDS for row in rows):
            raise ValueError(f"no samples, or files of another kind than {', '.join(KINDS)}")
        return rows
    except (OSError, ValueError, csv.Error) as error:
        raise FormatError(Fault(str(table), None, f"cannot be read as a table of samples ({error})")) from error
