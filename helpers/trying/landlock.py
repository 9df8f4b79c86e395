"""Linux's Landlock: from now on this process and its children write below some folders only.

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
OF_FILES = WRITE | TRUNCATE
TCP, SIGNALS = 0b11, 1 << 1  # to bind and to connect (since version 4); to send to processes outside (6)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


def restrict(folders: Iterable[str], alone: bool = False) -> None:
    """Refuse to write anywhere but below these, and if `alone` TCP and signals to others, where the kernel can."""
    call = ctypes.CDLL(None, use_errno=True)
    version = call.syscall(CREATE, None, ctypes.c_size_t(0), VERSION)
    if version < 2:
        return
    rights = WRITE | REMOVE | MAKE | MOVE | (TRUNCATE if version >= 3 else 0)
    handled = (ctypes.c_uint64 * 3)(rights, TCP * alone, SIGNALS * alone)  # files, network, what is kept inside
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = call.syscall(CREATE, ctypes.byref(handled), ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return
    for folder in folders:
        try:
            handle = os.open(folder, PATH_ONLY | os.O_CLOEXEC)
        except OSError:
            continue
        allowed = rights if os.path.isdir(folder) else rights & OF_FILES
        call.syscall(ADD, ruleset, BENEATH, ctypes.byref(_Beneath(allowed, handle)), 0)
        os.close(handle)
    call.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call.syscall(RESTRICT, ruleset, 0)
    os.close(ruleset)
