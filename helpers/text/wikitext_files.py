"""WikiText's files: text, or parquet files, which can be downloaded from the Hugging Face hub.

The old layout is `wiki.train.raw` (or `.tokens`, whose rare words are `<unk>`), `wiki.valid.*`, `wiki.test.*`, in a
folder; the hub's layout is `train-00000-of-00002.parquet` and so on, one row a line. Downloads are of one
revision, and sizes and checksums are those of its LFS objects. `$HF_ENDPOINT` names a mirror.
"""

import codecs
import hashlib
import http.client
import os
import re
import socket
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from helpers.lab.files import cache_folder

from .vocab import TextError, reading

SPLITS = {"train": ("train",), "validation": ("valid", "validation"), "test": ("test",)}
SUFFIXES = (".raw", ".tokens")
PARQUET = re.compile(r"(\w+)-(\d+)-of-(\d+)\.parquet")

DATASET, CONFIGURATION = "Salesforce/wikitext", "wikitext-103-raw-v1"
TO_GET_IT = f"to get it: pip install pyarrow, WikiText(split, download=True); it lies in the cache, in {CONFIGURATION}"
REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"
# split -> (bytes, sha256) of its files, which are called `SPLIT-00000-of-00002.parquet` and so on
FILES = {
    "train": (
        (156_987_808, "74da360f23826045b3e6ac6375411fdb15f003030aa74f2596ed08b857cb9212"),
        (157_088_770, "ba090ac30dbf5461e8dcbdd1a1b8e6f3cf9c2c756d64f0c1220450acd514f720"),
    ),
    "validation": ((657_209, "204929b7ff9d6184953f867dedb860e40aa69c078fc1e54b3baaa8fb28511c4c"),),
    "test": ((732_610, "5f1bea067869d04849c0f975a2b29c4ff47d867f484f5010ea5e861eab246d91"),),
}
SECONDS = 60  # of silence, after which a download fails


@dataclass(frozen=True)
class Source:
    """The files of one text, in order."""

    files: tuple[Path, ...]

    @property
    def name(self) -> str:
        """The name for captions: which WikiText this is, as far as the names of its files tell."""
        within = self.files[0]
        folder = within.resolve().parent.name
        match = re.match(r"(?:wiki\.)?(train|valid|validation|test)\b", within.name)
        if not match:
            return within.name
        family = re.search(r"wikitext-(2|103)(?!\d)", folder.lower())
        which = f"WikiText-{family[1]}" if family else "WikiText"
        raw = " raw" if within.suffix == ".raw" or (within.suffix == ".parquet" and "raw" in folder.lower()) else ""
        split = next(split for split, names in SPLITS.items() if match[1] in names)
        return f"{which}{raw}, {split} split"


def find(path: Path | str, split: str) -> Source:
    """The split's text in a folder, or a folder in it; a file is the text itself."""
    path = Path(path)
    if path.is_dir():
        return _in_folder(path, split)
    if not path.exists():
        raise TextError(f"{path}: is not there; give a folder or a file of WikiText ({TO_GET_IT})")
    if path.suffix == ".zip":
        raise TextError(f"{path}: a zip; unpack it and give the folder")
    return Source((path,))


def lines(source: Source) -> Iterator[str]:
    """The text line by line, with one line in memory (of parquet: some thousand)."""
    for file in source.files:
        if file.suffix == ".parquet":
            yield from _parquet_lines(file)
        else:
            yield from _file_lines(file)


def parquet() -> Any:
    """The module `pyarrow.parquet`; a `TextError` if it isn't installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise TextError(f"reading parquet files needs pyarrow: pip install pyarrow ({error})") from error
    return pyarrow.parquet


def _in_folder(folder: Path, split: str) -> Source:
    with reading(folder):
        folders = [folder, *sorted((p for p in folder.iterdir() if p.is_dir()), key=_order)]
        for candidate in folders:
            for file in (candidate / name for name in _text_names(split)):
                if file.is_file():
                    return Source((file,))
            parts = sorted(p for p in candidate.glob("*.parquet") if _is_part(p, split))
            if parts:
                return Source(_complete(parts, split))
    sought = ", ".join([*_text_names(split)[:2], f"{split}-*.parquet"])
    raise TextError(f"{folder}: has no {split} split ({sought}; {TO_GET_IT}); to use another text, name its file")


def _order(path: Path) -> tuple[bool, bool, str]:
    """A sort key: WikiText-103 first, raw before tokens."""
    return "wikitext-103" not in path.name, "raw" not in path.name, path.name


def _text_names(split: str) -> list[str]:
    return [f"wiki.{name}{suffix}" for suffix in SUFFIXES for name in SPLITS[split]]


def _is_part(file: Path, split: str) -> bool:
    match = PARQUET.fullmatch(file.name)
    return bool(match) and match[1] in SPLITS[split]


def _complete(parts: list[Path], split: str) -> tuple[Path, ...]:
    count = int(PARQUET.fullmatch(parts[0].name)[3])
    numbers = [int(PARQUET.fullmatch(part.name)[2]) for part in parts]
    if numbers != list(range(count)):
        have = ", ".join(part.name for part in parts)
        raise TextError(f"{parts[0].parent}: the {split} split is {count} parquet files, here are only {have}")
    return tuple(parts)


def _file_lines(file: Path) -> Iterator[str]:
    """Lines of UTF-8; each must end in a line feed."""
    with reading(file), open(file, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.endswith(b"\n"):
                raise TextError(f"{file}, line {number}: cut off in mid-line; get the whole file, or end its last line")
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                raise TextError(f"{file}, line {number}: not UTF-8 ({error.reason}); get the file again") from error


def _parquet_lines(file: Path) -> Iterator[str]:
    reader = parquet()
    try:
        with reader.ParquetFile(file) as stored:
            for batch in stored.iter_batches(columns=["text"]):
                yield from (row or "" for row in batch.column("text").to_pylist())
    except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors are ValueErrors and OSErrors
        reason = str(error).splitlines()[0]
        raise TextError(f"{file}: not a whole parquet file with a text column ({reason}); get it again") from error


def hub_files(split: str, cache: Path | str | None = None, *, download: bool = False) -> list[Path]:
    """A split's files in the cache, with checksums verified; missing ones are fetched with `download`."""
    folder, parts = cache_folder(cache) / CONFIGURATION, FILES[split]
    names = [f"{split}-{number:05d}-of-{len(parts):05d}.parquet" for number in range(len(parts))]
    return [_hub_file(folder / name, *part, download) for name, part in zip(names, parts, strict=True)]


def _hub_file(file: Path, size: int, digest: str, download: bool) -> Path:
    if file.is_file() and file.stat().st_size == size and sha256(file) == digest:
        return file
    if not download:
        state = "is damaged" if file.exists() else "is not there"
        raise TextError(f"{file}: {state}; give path= to WikiText-103's files, or download=True ({size / 1e6:.1f} MB)")
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    folder = f"{endpoint.rstrip('/')}/datasets/{DATASET}/resolve/{REVISION}/{CONFIGURATION}"
    _download(f"{folder}/{file.name}", file, digest)
    return file


def _download(url: str, file: Path, digest: str) -> None:
    """Fetch a file and verify its checksum."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SECONDS)  # torch.hub has no argument for it
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(file), hash_prefix=digest)
        return
    except urllib.error.HTTPError as error:
        reason = f"the server answers {error.code} {error.reason}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = f"cannot be fetched ({getattr(error, 'reason', None) or error})"
    except RuntimeError:  # torch.hub's error for a wrong checksum
        reason = "its checksum is wrong"
    finally:
        socket.setdefaulttimeout(before)
    raise TextError(f"{url}: {reason}; nothing was saved: try again, or give path= to files you have")


def sha256(file: Path) -> str:
    """The checksum of a file's content. Costs one pass: about a second a GB."""
    with reading(file), open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
