"""Where WikiText's lines come from: a text file, a zip of them, or parquet files.

The old layout is `wiki.train.raw` (or `.tokens`, whose rare words are `<unk>`), `wiki.valid.*`, `wiki.test.*`, in a
folder or a zip; the hub's layout is `train-00000-of-00002.parquet` and so on, one row a line.
"""

import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import TextError, unreadable

SPLITS = {"train": ("train",), "validation": ("valid", "validation"), "test": ("test",)}
SUFFIXES = (".raw", ".tokens")
PARQUET = re.compile(r"(\w+)-(\d+)-of-(\d+)\.parquet")


@dataclass(frozen=True)
class Source:
    """Files that hold one text, in their order; `member` is the name of the text within a zip."""

    files: tuple[Path, ...]
    member: str = ""

    @property
    def name(self) -> str:
        """What stands in captions: which WikiText this is, as far as its names say."""
        within = Path(self.member) if self.member else self.files[0]
        folder = within.parent.name or (self.files[0].stem if self.member else self.files[0].resolve().parent.name)
        found = re.match(r"(?:wiki\.)?(train|valid|validation|test)\b", within.name)
        if not found:
            return within.name
        family = re.search(r"wikitext-(2|103)(?!\d)", folder.lower())
        which = f"WikiText-{family[1]}" if family else "WikiText"
        raw = " raw" if within.suffix == ".raw" or (within.suffix == ".parquet" and "raw" in folder.lower()) else ""
        split = next(split for split, names in SPLITS.items() if found[1] in names)
        return f"{which}{raw}, {split} split"


def find(path: Path | str, split: str) -> Source:
    """The split's text in a folder (or a folder in it), in a zip, or the file itself, whatever it is called."""
    path = Path(path)
    if path.is_dir():
        return _in_folder(path, split)
    if not path.exists():
        raise TextError(f"{path}: is not there; give a folder, a zip or a file of WikiText")
    return _in_zip(path, split) if path.suffix == ".zip" else Source((path,))


def lines(source: Source) -> Iterator[str]:
    """The text, line by line; nothing is held in memory but the line (of parquet: some thousand rows)."""
    for file in source.files:
        if file.suffix == ".parquet":
            yield from _parquet_lines(file)
        elif source.member:
            yield from _zip_lines(file, source.member)
        else:
            yield from _file_lines(file)


def parquet() -> Any:
    """`pyarrow.parquet`, which only this layout needs."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise TextError(f"reading parquet files needs pyarrow: pip install pyarrow ({error})") from error
    return pyarrow.parquet


def _in_folder(folder: Path, split: str) -> Source:
    try:
        places = [folder, *sorted((p for p in folder.iterdir() if p.is_dir()), key=_order)]
        for place in places:
            for file in (place / name for name in _text_names(split)):
                if file.is_file():
                    return Source((file,))
            parts = sorted(p for p in place.glob("*.parquet") if _is_part(p, split))
            if parts:
                return Source(_complete(parts, split))
        zips = [file for file in sorted(folder.glob("*.zip"), key=_order) if _members(file, split)]
    except OSError as error:
        raise unreadable(folder, error) from error
    if zips:
        return _in_zip(zips[0], split)
    sought = ", ".join([*_text_names(split)[:2], f"{split}-*.parquet"])
    raise TextError(f"{folder}: has no {split} split ({sought}); to use another text as it, name the file itself")


def _order(path: Path) -> tuple[bool, bool, str]:
    """WikiText-103 before others, raw before the rest."""
    return "wikitext-103" not in path.name, "raw" not in path.name, path.name


def _text_names(split: str) -> list[str]:
    return [f"wiki.{name}{suffix}" for suffix in SUFFIXES for name in SPLITS[split]]


def _is_part(file: Path, split: str) -> bool:
    found = PARQUET.fullmatch(file.name)
    return bool(found) and found[1] in SPLITS[split]


def _complete(parts: list[Path], split: str) -> tuple[Path, ...]:
    count = int(PARQUET.fullmatch(parts[0].name)[3])
    numbers = [int(PARQUET.fullmatch(part.name)[2]) for part in parts]
    if numbers != list(range(count)):
        have = ", ".join(part.name for part in parts)
        raise TextError(f"{parts[0].parent}: the {split} split is {count} parquet files, here are only {have}")
    return tuple(parts)


def _members(file: Path, split: str) -> list[str]:
    try:
        with zipfile.ZipFile(file) as archive:
            names = {Path(name).name: name for name in archive.namelist()}
    except zipfile.BadZipFile as error:
        raise TextError(f"{file}: not a whole zip file ({error}); get it again") from error
    return [names[name] for name in _text_names(split) if name in names]


def _in_zip(file: Path, split: str) -> Source:
    try:
        members = _members(file, split)
    except OSError as error:
        raise unreadable(file, error) from error
    if not members:
        raise TextError(f"{file}: has no {split} split in it ({', '.join(_text_names(split)[:2])})")
    return Source((file,), members[0])


def _file_lines(file: Path) -> Iterator[str]:
    try:
        with open(file, "rb") as stream:
            yield from _decoded(stream, str(file))
    except OSError as error:
        raise unreadable(file, error) from error


def _zip_lines(file: Path, member: str) -> Iterator[str]:
    try:
        with zipfile.ZipFile(file) as archive, archive.open(member) as stream:
            yield from _decoded(stream, f"{file}, {member}")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise TextError(f"{file}: {member} cannot be unpacked ({error}); get the zip again") from error
    except OSError as error:
        raise unreadable(file, error) from error


def _decoded(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """Lines end in a line feed and nothing else; the last one, too."""
    for number, line in enumerate(stream, start=1):
        if not line.endswith(b"\n"):
            raise TextError(f"{name}, line {number}: cut off in mid-line; get the whole file, or end its last line")
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise TextError(f"{name}, line {number}: not UTF-8 ({error.reason}); get the file again") from error


def _parquet_lines(file: Path) -> Iterator[str]:
    reader = parquet()
    try:
        with reader.ParquetFile(file) as stored:
            for batch in stored.iter_batches(columns=["text"]):
                yield from (row or "" for row in batch.column("text").to_pylist())
    except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors are ValueErrors and OSErrors
        reason = str(error).splitlines()[0]
        raise TextError(f"{file}: not a whole parquet file with a text column ({reason}); get it again") from error
