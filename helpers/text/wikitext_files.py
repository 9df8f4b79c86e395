"""WikiText's files: text, or parquet files, which can be downloaded from the Hugging Face hub.

The old layout is `wiki.train.raw` (or `.tokens`, whose rare words are `<unk>`), `wiki.valid.*`, `wiki.test.*`; the
hub's layout is `train-00000-of-00002.parquet` and so on, one row a line. Downloads are of one revision, whose checksums
stand here. `$HF_ENDPOINT` names a mirror.
"""

import http.client
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from helpers.lab.files import cache_folder

from .vocab import TextError

SPLITS = {"train": ("train",), "validation": ("valid", "validation"), "test": ("test",)}  # and their names in files

DATASET, CONFIGURATION = "Salesforce/wikitext", "wikitext-103-raw-v1"
REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"
CHECKSUMS = {  # sha256 of a split's files
    "train": (
        "74da360f23826045b3e6ac6375411fdb15f003030aa74f2596ed08b857cb9212",
        "ba090ac30dbf5461e8dcbdd1a1b8e6f3cf9c2c756d64f0c1220450acd514f720",
    ),
    "validation": ("204929b7ff9d6184953f867dedb860e40aa69c078fc1e54b3baaa8fb28511c4c",),
    "test": ("5f1bea067869d04849c0f975a2b29c4ff47d867f484f5010ea5e861eab246d91",),
}
TO_GET_IT = f"to get it: pip install pyarrow, WikiText(split, download=True); it lies in the cache, in {CONFIGURATION}"


def find(path: Path | str, split: str) -> list[Path]:
    """The files of the split's text in a folder; a file is the text itself."""
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise TextError(f"{path}: is not there; give a folder or a file of WikiText ({TO_GET_IT})")
    for suffix in ("raw", "tokens"):
        for name in SPLITS[split]:
            if (file := path / f"wiki.{name}.{suffix}").is_file():
                return [file]
    parts = sorted(path.glob(f"{split}-*-of-*.parquet"))
    if not parts:
        sought = f"wiki.{SPLITS[split][0]}.raw or .tokens, {split}-*.parquet"
        raise TextError(f"{path}: has no {split} split ({sought}; {TO_GET_IT}); to use another text, name its file")
    if len(parts) != (count := int(parts[0].stem.rpartition("-")[2])):
        have = ", ".join(part.name for part in parts)
        raise TextError(f"{path}: the {split} split is {count} parquet files, here are only {have}")
    return parts


def name_of(file: Path) -> str:
    """The name for captions: which WikiText a file is of, as far as its name and its folder's tell."""
    folder = file.resolve().parent.name.lower()
    match = re.match(r"(?:wiki\.)?(train|valid|validation|test)\b", file.name)
    if not match:
        return file.name
    family = re.search(r"wikitext-(2|103)(?!\d)", folder)
    which = f"WikiText-{family[1]}" if family else "WikiText"
    raw = " raw" if file.suffix == ".raw" or (file.suffix == ".parquet" and "raw" in folder) else ""
    split = next(split for split, names in SPLITS.items() if match[1] in names)
    return f"{which}{raw}, {split} split"


def lines(files: list[Path]) -> Iterator[str]:
    """The text line by line, with one line in memory (of parquet: some thousand)."""
    for file in files:
        yield from _parquet_lines(file) if file.suffix == ".parquet" else _file_lines(file)


def parquet() -> Any:
    """The module `pyarrow.parquet`; a `TextError` if it isn't installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise TextError(f"reading parquet files needs pyarrow: pip install pyarrow ({error})") from error
    return pyarrow.parquet


def _file_lines(file: Path) -> Iterator[str]:
    """Lines of UTF-8; each must end in a line feed."""
    try:
        with open(file, encoding="utf-8-sig", newline="\n") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.endswith("\n"):
                    raise TextError(f"{file}, line {number}: cut off in mid-line; get the file again, or end its line")
                yield line
    except UnicodeDecodeError as error:
        raise TextError(f"{file}: not UTF-8 ({error.reason}); get the file again, or unpack it") from error


def _parquet_lines(file: Path) -> Iterator[str]:
    reader = parquet()
    try:
        with reader.ParquetFile(file) as stored:
            for batch in stored.iter_batches(columns=["text"]):
                yield from (row or "" for row in batch.column("text").to_pylist())
    except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors are ValueErrors and OSErrors
        reason = str(error).splitlines()[0]
        raise TextError(f"{file}: not a whole parquet file with a text column ({reason}); get it again") from error


def hub_files(split: str, *, download: bool = False) -> list[Path]:
    """A split's files in the cache; missing ones are fetched with `download`, and their checksums verified."""
    folder, checksums = cache_folder() / CONFIGURATION, CHECKSUMS[split]
    names = [f"{split}-{number:05d}-of-{len(checksums):05d}.parquet" for number in range(len(checksums))]
    for name, checksum in zip(names, checksums, strict=True):
        if not (folder / name).is_file():
            if not download:
                raise TextError(f"{folder / name}: is not there; give path= to WikiText-103's files, or download=True")
            _download(folder / name, checksum)
    return [folder / name for name in names]


def _download(file: Path, checksum: str) -> None:
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    url = f"{endpoint.rstrip('/')}/datasets/{DATASET}/resolve/{REVISION}/{CONFIGURATION}/{file.name}"
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.hub.download_url_to_file(url, str(file), hash_prefix=checksum)
    except (OSError, http.client.HTTPException, ValueError, RuntimeError) as error:  # RuntimeError: a wrong checksum
        reason = " ".join(str(error).split())
        raise TextError(f"{url}: not fetched ({reason}); try again, or give path= to files you have") from error
