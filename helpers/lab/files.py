"""Files that are written whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path | str) -> Iterator[BinaryIO]:
    """A stream that becomes `path` when the block ends well; otherwise `path` stays as it was and nothing is left.

    Only a kill leaves the hidden part file behind; nothing ever reads it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write(path: Path | str, content: bytes | str) -> Path:
    """Write a file whole or not at all."""
    with replacing(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
    return Path(path)


def cache_folder(cache: Path | str | None = None) -> Path:
    """Where downloads and made files are kept: `cache`, else `$HELPERS_CACHE`, else `~/.cache/deep-learning-speed`."""
    return Path(cache or os.environ.get("HELPERS_CACHE") or Path.home() / ".cache" / "deep-learning-speed")
