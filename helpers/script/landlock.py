"""Linux's Landlock: from now on this process and its children write, and maybe read, below some folders only.

The kernel refuses what Python's functions don't see: compiled code and commands that the script starts. It needs no
privileges, and Linux 5.19 or later.
"""

import ctypes
import os
from collections.abc import Iterable

CREATE, ADD, RESTRICT = 444, 445, 446  # system calls, of the same number on all machines
BENEATH = 1  # the kind of rule
VERSION = 1  # a flag of CREATE: only ask for the version
NO_NEW_PRIVILEGES, PATH_ONLY = 38, 0o10000000
# The rights to write to a file, to remove, to make anything, to move it elsewhere (since version 2), to truncate (3).
WRITE, REMOVE, MAKE, MOVE, TRUNCATE = 1 << 1, 0b11 << 4, 0b1111111 << 6, 1 << 13, 1 << 14
READ = 1 << 2  # a file; which files there are isn't kept secret
OF_FILES = WRITE | TRUNCATE | READ
TCP, SIGNALS = 0b11, 1 << 1  # to bind and to connect (since version 4); to send to processes outside (6)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


def version() -> int:
    """Of the kernel's Landlock; below 1 if there is none."""
    return ctypes.CDLL(None).syscall(CREATE, None, ctypes.c_size_t(0), VERSION)


def unlimited() -> list[str]:
    """What `restrict` can't refuse on this machine, with all that it is asked for."""
    needs = {"files": 2, "TCP": 4, "signals to other processes": 6}
    return [what for what, least in needs.items() if version() < least]


def restrict(writable: Iterable[str], readable: Iterable[str] | None = None, alone: bool = False) -> None:
    """Refuse to write anywhere but below these, as the kernel can.

    With `readable` it refuses to read files anywhere but below those and these; if `alone`, TCP and signals to others.
    """
    call, known = ctypes.CDLL(None, use_errno=True), version()
    if known < 2:
        return
    writes = WRITE | REMOVE | MAKE | MOVE | (TRUNCATE if known >= 3 else 0)
    rights = writes | (0 if readable is None else READ)
    handled = (ctypes.c_uint64 * 3)(rights, TCP * alone, SIGNALS * alone)  # files, network, what is kept inside
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    ruleset = call.syscall(CREATE, ctypes.byref(handled), ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return
    for path, granted in [*((path, rights) for path in writable), *((path, READ) for path in readable or ())]:
        try:
            handle = os.open(path, PATH_ONLY | os.O_CLOEXEC)
        except OSError:
            continue
        allowed = granted if os.path.isdir(path) else granted & OF_FILES
        call.syscall(ADD, ruleset, BENEATH, ctypes.byref(_Beneath(allowed, handle)), 0)
        os.close(handle)
    call.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call.syscall(RESTRICT, ruleset, 0)
    os.close(ruleset)
