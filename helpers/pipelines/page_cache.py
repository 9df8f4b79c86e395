"""Makes reads cold: drops files from the page cache, and looks whether they are gone.

What the disk itself, its controller or a host below a virtual machine keeps cannot be dropped from here: cold means
that this kernel has to ask the disk. On a file system in memory (tmpfs) and on some network ones nothing lets go.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

DROP = "/proc/sys/vm/drop_caches"


def flush(folder: str | Path) -> None:
    """Write what is dirty on a folder's file system to the disk: only clean pages can be dropped. One call for all."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(handle):
            raise OSError(ctypes.get_errno(), f"cannot flush {folder}")
    finally:
        os.close(handle)


def evict(files: Iterable[Path]) -> str:
    """Drop files from the page cache, and say how cold they are: `data and inodes`, `data`, or `warm: …` if not.

    The files must be flushed, and not mapped by anyone. Inodes and folders are dropped for the whole machine, where
    that is permitted (root). Costs about 30 µs a file, most of it for looking afterwards.
    """
    if not hasattr(os, "posix_fadvise"):
        return "warm: this system has no posix_fadvise"
    files = list(files)
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    left, total = (sum(column) for column in zip(*map(cached_pages, files), strict=True))
    if left:
        return f"warm: {left} of {total} pages stayed in the cache"
    try:
        with open(DROP, "w") as stream:
            stream.write("2")
    except OSError:
        return "data"
    return "data and inodes"


def cached_pages(file: Path) -> tuple[int, int]:
    """How many pages of a file the cache holds, and how many it has. Touches none of them."""
    size = os.stat(file).st_size
    if not size:
        return 0, 0
    pages = -(-size // mmap.PAGESIZE)
    held = (ctypes.c_ubyte * pages)()
    with open(file, "rb") as stream, mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        view = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), held)
        del view  # else the map cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {file}")
    return sum(byte & 1 for byte in held), pages
