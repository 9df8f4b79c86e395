"""Files of this room: the error that names one, its checksum, and how it is replaced whole or not at all."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from helpers.lab import files

BLOCK = 2**20


class TextError(ValueError):
    """Text that cannot be had or trusted: one line that names the file or value and says what to do."""


def cache_folder(cache: Path | str | None = None) -> Path:
    """Where downloads and tokens are kept: `cache`, else `$HELPERS_CACHE`, else `~/.cache/deep-learning-speed`."""
    if cache is None:
        cache = os.environ.get("HELPERS_CACHE") or Path.home() / ".cache" / "deep-learning-speed"
    return Path(cache)


def sha256(file: Path) -> str:
    """The checksum of a file's content. Costs one pass: about a second a GB."""
    try:
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(file, error) from error


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """A stream that becomes `file` when the block ends well; otherwise `file` stays as it was and nothing is left.

    Only a kill leaves the hidden part file behind; nothing ever reads it.
    """
    try:
        with files.replacing(file) as stream:
            yield stream
    except OSError as error:
        said = error.strerror or error
        raise TextError(f"{file}: cannot be written ({said}); make room there, or choose another folder") from error


def unreadable(file: Path, error: OSError) -> TextError:
    return TextError(f"{file}: cannot be read ({error.strerror or error}); check the path and its permissions")


def at_least(name: str, value: int, least: int) -> int:
    """The value, if it is a whole number from `least` on."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise TextError(f"{name} is {value!r}; it must be a whole number, {least} or more")
    return value.__index__()
