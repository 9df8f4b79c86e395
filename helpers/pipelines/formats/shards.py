"""What formats of several shards share: files that are read at any offset, found by number, and counted through."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from .sample import Fault, FormatError, admit

Table = TypeVar("Table")


class Handles:
    """Reads from many files at any offset. Files are opened when first read and stay open.

    `pread` has no position that processes could share, so a forked worker goes on with what its parent opened; one
    that is spawned gets none of it (`pickle` leaves it behind) and opens its own.
    """

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def pread(self, file: str, offset: int, size: int) -> bytes:
        """Up to `size` bytes; fewer at the end of the file."""
        if file not in self._open:
            self._open[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        parts, left = [], size
        while left and (part := os.pread(self._open[file], left, offset + size - left)):
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict:
        return {"_open": {}}


class Places:
    """Which shard a place lies in, and where in it."""

    def __init__(self, counts: list[int]) -> None:
        self.starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
        self.runs = [range(low, high) for low, high in zip(self.starts, self.starts[1:], strict=False) if high > low]

    def __call__(self, place: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self.starts, place, side="right")) - 1
        return shard, place - self.starts[shard]


def numbered(folder: Path, suffix: str, index_suffix: str, policy: str, kept: list[Fault]) -> list[Path]:
    """The shards of a folder, `00000.tar` and on, also those of which only the index is left. A gap is a fault."""
    names = {file.name.removesuffix(end) for end in (suffix, index_suffix) for file in folder.glob(f"*{end}")}
    stems = sorted(filter(str.isdigit, names))
    if not stems:
        raise FormatError(Fault(str(folder), None, f"no shards; expected 00000{suffix} and on"))
    for number in sorted(set(range(int(stems[-1]) + 1)) - set(map(int, stems))):
        file = folder / f"{number:05d}{suffix}"
        admit(Fault(str(file), None, "no such shard, though there are later ones"), policy, kept)
    return [folder / f"{stem}{suffix}" for stem in stems]


def opened(
    folder: Path, suffix: str, index_suffix: str, policy: str, kept: list[Fault], read: Callable[[Path], Table]
) -> list[tuple[str, Table]]:
    """Each shard of a folder with its index, as `read` gives it; what has none that can be read is a fault."""
    found = []
    for shard in numbered(folder, suffix, index_suffix, policy, kept):
        try:
            found.append((str(shard), read(shard)))
        except FormatError as error:
            admit(error.fault, policy, kept)
    return found


def check_size(shard: Path, expected: int, policy: str, kept: list[Fault]) -> None:
    """A shard of another size than its index says is a fault, also where no sample is lost. Samples beyond its end say
    so themselves when they are read."""
    size = shard.stat().st_size if shard.is_file() else None
    if size != expected:
        said = "no such shard" if size is None else f"truncated or changed: it has {size} bytes"
        admit(Fault(str(shard), None, f"{said}; its index says {expected} bytes"), policy, kept)


def some(count: int, folder: Path, kept: list[Fault]) -> None:
    """Refuse a data set of which nothing is left, whatever the policy."""
    if not count:
        raise FormatError(Fault(str(folder), None, f"nothing in it could be opened; the first: {kept[0]}"))
