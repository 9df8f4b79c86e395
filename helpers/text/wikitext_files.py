"""WikiText's files: text, or the parquet files of the Hugging Face hub.

The old layout is `wiki.train.raw` (or `.tokens`, whose rare words are `<unk>`), `wiki.valid.*`, `wiki.test.*`; the
hub's layout is `train-00000-of-00002.parquet` and so on, one row a line.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from .vocab import TextError

SPLITS = {"train": ("train",), "validation": ("valid", "validation"), "test": ("test",)}  # and their names in files

TO_GET_IT = (
    "to get it: hf download Salesforce/wikitext --repo-type dataset --include 'wikitext-103-raw-v1/*' --local-dir DIR"
)


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
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise TextError(f"{file}: reading parquet files needs pyarrow: pip install pyarrow ({error})") from error
    try:
        with ParquetFile(file) as stored:
            for batch in stored.iter_batches(columns=["text"]):
                yield from (row or "" for row in batch.column("text").to_pylist())
    except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors are ValueErrors and OSErrors
        reason = str(error).splitlines()[0]
        raise TextError(f"{file}: not a whole parquet file with a text column ({reason}); get it again") from error
