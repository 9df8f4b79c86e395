"""Atomic writing of files, locks, and where files lie: the project, and the folder for downloads."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows: nothing is locked
    fcntl = None


@contextlib.contextmanager
def replacing(path: Path | str) -> Iterator[BinaryIO]:
    """A stream whose content replaces `path` when the block succeeds; if it raises, `path` is unchanged.

    Only a killed process leaves the hidden part file behind; nothing reads it.
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
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk names none
        raise
    finally:
        part.unlink(missing_ok=True)


def write(path: Path | str, content: bytes | str) -> Path:
    """Write a file atomically; returns its path."""
    with replacing(path) as stream:
        # A name from JSON may hold half of a character, which no UTF-8 does.
        stream.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    return Path(path)


@contextlib.contextmanager
def building(folder: Path | str) -> Iterator[Path]:
    """A temporary folder beside `folder`, which gets its name if the block succeeds: complete, or not there at all.

    Only a killed process leaves the hidden temporary folder behind; nothing reads it.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; a data set is written to a folder that is new or empty")
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        yield part
        os.rename(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def regular(path: Path | str) -> Path | str:
    """The path of a file to read. An OSError for what isn't one: a pipe may be waited for forever, a device is endless.

    One that is missing is left to `open`.
    """
    if not os.path.isfile(path) and os.path.exists(path):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path


@contextlib.contextmanager
def locked(path: Path | str, refusal: str = "") -> Iterator[None]:
    """Hold the lock of a file or folder, which ends with the process, also if it is killed.

    If another process holds it, wait; with a `refusal`, raise a BlockingIOError that says it.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
    except BlockingIOError:
        os.close(handle)
        raise BlockingIOError(refusal) from None
    try:
        yield
    finally:
        os.close(handle)


def check_writable(folder: Path | str, option: str) -> None:
    """An OSError, which names the option for another place, unless files can be created in the folder.

    It is made if it isn't there.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} can't be written: name another place ({option})")


def cache_folder(cache: Path | str | None = None) -> Path:
    """The folder of cached files: `cache`, else `$HELPERS_CACHE`, else `~/.cache/deep-learning-speed`."""
    return Path(cache or os.environ.get("HELPERS_CACHE") or Path.home() / ".cache" / "deep-learning-speed")


def project_root() -> Path:
    """The folder with `notebooks/` and `data/`: the checkout that this package lies in, else the current folder.

    `$HELPERS_ROOT` overrides both.
    """
    if "HELPERS_ROOT" in os.environ:
        return Path(os.environ["HELPERS_ROOT"]).resolve()
    checkout = Path(__file__).resolve().parents[2]
    return checkout if (checkout / "notebooks").is_dir() else Path.cwd()
