"""A folder that a script writes to in place of the user's: files are read from where they are, writes land here.

The scratch has the tree of the file system, with links to what the current folder and the two above it hold. Python's
own functions on paths are replaced: one that reads gets the file in the scratch if there is one, else the user's; one
that writes gets a path in the scratch, whose link is first replaced by a file. What lies under /tmp, /dev and the
caches of libraries is used as it is. Overwriting any other file outside of the script's folders is refused.

Writes by compiled code go through the wrappers of `PATH_WRITERS`; where the kernel has Landlock, it refuses all others.
"""

import builtins
import functools
import importlib
import importlib.util
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import landlock

UP = 2  # folders above the current one whose entries are linked, too
READERS = ("stat", "lstat", "listdir", "scandir", "access", "readlink", "chdir")
REMOVERS = ("remove", "unlink", "rmdir")
MAKERS = ("mkdir", "truncate", "chmod", "utime")
PATH_WRITERS = [("torch", "save", 1), ("safetensors.torch", "save_file", 1), ("sqlite3", "connect", 0)]
CACHES = ("~/.cache", "~/.triton", "~/.config", "~/nltk_data")
CACHE_VARIABLES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
SYSTEM = ("/dev", "/proc", "/sys", "/run")


class Scratch:
    """`root` is the scratch's folder, `folders` are the user's; `redirected` collects the paths of theirs written."""

    def __init__(self, root: str, folders: Sequence[str]) -> None:
        self.root, self.folders = os.path.realpath(root), [os.path.realpath(folder) for folder in folders]
        self.redirected: dict[str, None] = {}
        self.removed: set[str] = set()
        named = [os.environ[name] for name in CACHE_VARIABLES if name in os.environ]
        free = [tempfile.gettempdir(), *map(os.path.expanduser, CACHES), *SYSTEM, *named]
        self.free = [os.path.realpath(path) for path in free]

    def user_path(self, path: str) -> str:
        """The path that a path in the scratch stands for; others as they are."""
        path = os.path.abspath(path)
        return path.removeprefix(self.root) or "/" if _under(path, self.root) else path

    def readable(self, path: str) -> str:
        """Where to read: in the scratch if it is there, else the user's."""
        own = self.user_path(path)
        here = self.root + own
        return here if own in self.removed or os_lexists(here) else own

    def writable(self, path: str, keep: bool = False) -> str:
        """Where to write; `keep` if what the file holds is needed. PermissionError for a file of somebody else's."""
        own = self.user_path(path)
        if self._is_free(own):
            return own
        theirs = os_lexists(own) and not os.path.isdir(own) and own not in self.redirected
        if theirs and not any(_under(own, folder) for folder in self.folders):
            raise PermissionError(f"{own} would be overwritten: dlspeed try leaves it as it is")
        here = self.root + own
        self._make_parent(here)
        if _works("readlink", here):
            originals["unlink"](here)
        hidden = not os_lexists(here) and os_lexists(own) and own not in self.removed
        if hidden and os.path.isdir(own):
            self._mirror(here, own)
        elif hidden and keep:
            with originals["open"](own, "rb") as theirs, originals["open"](here, "wb") as ours:
                shutil.copyfileobj(theirs, ours)
        self.removed.discard(own)
        self.redirected[own] = None
        return here

    def remove(self, path: str) -> str:
        """Where to remove: a file of the user's counts as gone from now on."""
        own = self.user_path(path)
        if self._is_free(own):
            return own
        here = self.writable(own)
        if not os_lexists(here) and os_lexists(own) and own not in self.removed:
            if os.path.isdir(own):
                originals["mkdir"](here)
            else:
                originals["open"](here, "w").close()
        self.removed.add(own)
        return here

    def mirror_working_folder(self, folder: str) -> str:
        """Link what the current folder and those above it hold; returns the folder to work in."""
        folder = os.path.realpath(folder)
        chain = [Path(folder), *Path(folder).parents][: UP + 1]
        for each in reversed(chain):
            here = self.root + str(each)
            if _works("readlink", here):
                os.unlink(here)
            os.makedirs(here, exist_ok=True)
            self._link_entries(here, str(each))
        return self.root + folder

    def _is_free(self, own: str) -> bool:
        """Whether a path is nobody's work: the innermost folder around it decides."""

        def depth(folders: list[str]) -> int:
            return max((len(folder) for folder in folders if _under(own, folder)), default=-1)

        return depth(self.free) > depth(self.folders)

    def _make_parent(self, here: str) -> None:
        parent = os.path.dirname(here)
        if not _under(parent, self.root) or parent == self.root:
            return
        if _works("readlink", parent):
            originals["unlink"](parent)
        elif os_lexists(parent):
            return
        source = parent.removeprefix(self.root)
        self._make_parent(parent)
        if not os.path.isdir(source):
            raise FileNotFoundError(2, "No such file or directory", source)
        self._mirror(parent, source)

    def _mirror(self, here: str, source: str) -> None:
        originals["mkdir"](here)
        self._link_entries(here, source)

    def _link_entries(self, here: str, source: str) -> None:
        try:
            entries = originals["listdir"](source)
        except OSError:
            return
        for entry in entries:
            original = os.path.join(source, entry)
            if not _under(self.root, original) and not os_lexists(os.path.join(here, entry)):
                originals["symlink"](original, os.path.join(here, entry))


originals: dict[str, Any] = {name: getattr(os, name) for name in (*READERS, *REMOVERS, *MAKERS, "symlink")}
originals["open"] = builtins.open


def install(scratch: Scratch) -> None:
    """Replace the functions on paths in this process, and in those that it forks, by ones that go to the scratch."""

    def on_path(function: Callable, place: Callable[[str], str], index: int = 0) -> Callable:
        @functools.wraps(function)
        def placed(*arguments: Any, **options: Any) -> Any:
            given = arguments[index] if len(arguments) > index else None
            if options.get("dir_fd") is None and isinstance(given, (str, os.PathLike)) and given != ":memory:":
                where = place(os.fspath(given))
                arguments = (*arguments[:index], where, *arguments[index + 1 :])
            return function(*arguments, **options)

        return placed

    def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if isinstance(file, (str, os.PathLike)):
            name, keep = os.fspath(file), not set("wx") & set(mode)
            file = scratch.writable(name, keep) if set("wax+") & set(mode) else scratch.readable(name)
        return originals["open"](file, mode, *arguments, **options)

    low_open = os.open

    def opened_low(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if options.get("dir_fd") is None and isinstance(path, (str, os.PathLike)):
            writes, keep = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT), not flags & os.O_TRUNC
            path = scratch.writable(os.fspath(path), keep) if writes else scratch.readable(os.fspath(path))
        return low_open(path, flags, *arguments, **options)

    def moved(function: Callable) -> Callable:
        @functools.wraps(function)
        def move(source: Any, target: Any, **options: Any) -> None:
            if options.get("src_dir_fd") is None and options.get("dst_dir_fd") is None:
                source, target = os.fspath(source), os.fspath(target)
                source, gone = scratch.writable(source, keep=True), scratch.user_path(source)
                target = scratch.writable(target)
                scratch.removed.add(gone)
            function(source, target, **options)

        return move

    def rmtree(path: Any, *arguments: Any, **options: Any) -> None:
        remove_tree(scratch.remove(os.fspath(path)), *arguments, **options)

    landlock.restrict([scratch.root, *scratch.free])
    builtins.open = io.open = opened
    os.open = opened_low
    remove_tree, shutil.rmtree = shutil.rmtree, rmtree  # type: ignore[assignment]
    kept = functools.partial(scratch.writable, keep=True)
    for names, place in ((READERS, scratch.readable), (REMOVERS, scratch.remove), (MAKERS, kept)):
        for name in names:
            setattr(os, name, on_path(getattr(os, name), place))
    for name in ("rename", "replace"):
        setattr(os, name, moved(getattr(os, name)))
    for module, name, index in PATH_WRITERS:
        if importlib.util.find_spec(module.partition(".")[0]):
            holder = importlib.import_module(module)
            setattr(holder, name, on_path(getattr(holder, name), scratch.writable, index))


def os_lexists(path: str) -> bool:
    return _works("lstat", path)


def _works(function: str, path: str) -> bool:
    """Whether a function on paths raises nothing: `readlink` of links alone."""
    try:
        originals[function](path)
    except (OSError, ValueError):
        return False
    return True


def _under(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
