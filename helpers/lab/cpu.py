"""The CPU: its name in full, and whether its allocator keeps the pages of freed memory.

Cloud machines call their processors `AMD EPYC` or `Intel Xeon Processor`; which one it is decides the instruction sets
and with them the rate of matrix products. The family in /proc/cpuinfo and the flags tell.
"""

import ctypes
import functools
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

GENERATIONS = {  # vendor and family -> the flag that a generation came with, the newest first
    ("AuthenticAMD", 26): {"": "Zen 5"},
    ("AuthenticAMD", 25): {"avx512f": "Zen 4", "": "Zen 3"},
    ("AuthenticAMD", 23): {"clwb": "Zen 2", "": "Zen"},
    ("GenuineIntel", 6): {
        "amx_tile": "Sapphire Rapids or later",
        "avx512_vbmi2": "Ice Lake",
        "avx512_vnni": "Cascade Lake",
        "avx512f": "Skylake",
        "avx2": "Haswell or Broadwell",
    },
}
OF_ARM = ("asimd", "sve", "sve2", "bf16", "i8mm")
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", *OF_ARM)

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h

# glibc's settings, read when a process starts. By default it returns freed memory to the system and asks for it again,
# and the kernel clears each page anew. Kept: no block is mapped apart, nothing is returned. Huge pages: of 2 MiB.
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**11), "MALLOC_TOP_PAD_": str(2**28)}
ALLOCATORS = {"default": {}, "kept": KEPT, "huge pages": KEPT | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}}


def describe() -> str:
    """`AMD EPYC (Zen 3), 2 cores, 8 GiB, avx2, mkl`: model, cores, memory, instruction sets and BLAS."""
    flags = _facts().get("flags", _facts().get("Features", "")).split()
    sets = [name for name in INSTRUCTION_SETS if name in flags] or [torch.backends.cpu.get_cpu_capability().lower()]
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    libraries = [blas[1] if blas else "no BLAS", *(["oneDNN"] if torch.backends.mkldnn.is_available() else [])]
    memory = [f"{memory_gib():.0f} GiB"] if memory_gib() else []
    return ", ".join([model(), f"{os.cpu_count()} cores", *memory, *sets, " and ".join(libraries)])


def name() -> str:
    """The processor's name as the system gives it."""
    if "model name" in _facts():
        return " ".join(_facts()["model name"].split())
    return platform.processor() or platform.machine() or "unknown"


def memory_gib() -> float | None:
    """The machine's memory; None on Windows, which doesn't tell."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else None


def keep_pages() -> str:
    """From now on, let this process keep the pages of freed memory: "", or why it can't.

    glibc gives large freed blocks back to the kernel, and the kernel clears the pages of each new one. Training
    allocates and frees the same sizes in each step, so on a CPU clearing pages can take most of an elementwise
    operation's time: filling 64 MiB anew takes 21 ms, and 2.1 ms with kept pages. In exchange the process holds the
    most memory that it ever needed, and somewhat more where sizes vary. There is no way back in the same process.
    """
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return "needs glibc"
    if "malloc" in os.environ.get("LD_PRELOAD", ""):
        return f"the allocator is another: {os.environ['LD_PRELOAD']}"
    libc = ctypes.CDLL(None)
    accepted = libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, -1)  # no limit to what is kept
    return "" if accepted else "glibc refused"


def release_pages() -> None:
    """Give the pages of memory that is free by now back to the system."""
    ctypes.CDLL(None).malloc_trim(0)


def keeps_pages(environment: Mapping[str, str]) -> bool:
    """Whether a process with these variables keeps the pages of freed memory by glibc's settings."""
    return KEPT.items() <= environment.items()


def model() -> str:
    """The name, with the generation where the name has no number of a model in it."""
    bare = re.sub(r"@.*|\d+-core", "", name(), flags=re.IGNORECASE)
    if re.search(r"\d", bare):
        return name()
    facts = _facts()
    flags = {"", *facts.get("flags", "").split()}
    known = GENERATIONS.get((facts.get("vendor_id"), int(facts.get("cpu family", 0))), {})
    generation = next((generation for flag, generation in known.items() if flag in flags), "")
    return f"{name()} ({generation})" if generation else name()


@functools.cache
def _facts() -> dict[str, str]:
    """What /proc/cpuinfo says of the first core; nothing where there is none."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
