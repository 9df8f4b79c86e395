"""The machine: its device and class, what is installed, and the provenance that every record carries.

Nothing here initialises CUDA at import. `environment()` calls `nvidia-smi` and `git` once each (tens of milliseconds);
its result is cached.
"""

import datetime
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch

from . import cpu

PEERS = ("apex", "liger-kernel", "torchao", "transformers", "triton")  # optional packages

# The modules of packages that aren't imported by the name they are installed by.
MODULES = {"liger-kernel": "liger_kernel", "opencv-python-headless": "cv2", "pillow": "PIL", "scikit-learn": "sklearn"}

CXX = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")  # torch's default compiler; $CXX overrides it


BEGAN = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")  # this process, as records name their run


class DeviceError(RuntimeError):
    """The GPU that is there can't be used. The message says why, and what to do."""


def device() -> torch.device:
    """The device to measure: the current CUDA device if there is one, else the CPU.

    Raises `DeviceError` if this torch has no kernels for the GPU.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if reason := without_kernels():
        raise DeviceError(reason)
    return torch.device("cuda")


@functools.cache
def without_kernels() -> str:
    """Why this torch can't run on the GPU, for which it was not compiled; "" if it can.

    Machine code runs on its own major version's later GPUs, PTX on all later ones.
    """
    capability, built = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
    parsed = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name) for name in built]
    known = [(parts[1], (int(parts[2]), int(parts[3]))) for parts in parsed if parts]
    runs = any(at <= capability and (kind == "compute" or at[0] == capability[0]) for kind, at in known)
    if runs or not known:  # a ROCm build names its architectures in another way
        return ""
    has = f"torch {torch.__version__} has no kernels for compute capability {'.'.join(map(str, capability))}"
    return (
        f"{torch.cuda.get_device_name()}: {has}, only for {', '.join(built)}. Install a build of torch that has them, "
        "or set CUDA_VISIBLE_DEVICES= (empty) to use the CPU"
    )


def half_dtype() -> torch.dtype:
    """The 16-bit type whose products the device computes natively: bf16, or fp16 on a GPU below capability 8.0.

    Such a GPU, a T4 for example, runs bf16 too, but emulated and slower than fp32. fp16 needs loss scaling to train.
    """
    return torch.float16 if torch.cuda.is_available() and missing_because("native bf16") else torch.bfloat16


def multiplies_half() -> bool:
    """Whether 16-bit products are worth trying: without AVX-512 a CPU takes some 90 times as long as for fp32."""
    return torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def device_name() -> str:
    """`NVIDIA H200`, or the processor's model after `CPU `."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "CPU " + cpu.model()


BIG = 40e9  # bytes: a GPU with as much memory is a big one


def device_class() -> str:
    """This machine's class, which selects the configurations: `cpu`, `gpu`, or `big-gpu` from 40 GB of memory."""
    if not torch.cuda.is_available():
        return "cpu"
    return "big-gpu" if _gpu_bytes() >= BIG else "gpu"


def _gpu_bytes() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


class OthersLoad:
    """The mean number of cores that other processes used: `with OthersLoad() as load: …; load.cores`.

    Read from Linux's /proc, which takes a millisecond; None elsewhere. This process and its descendants don't count.
    """

    cores: float | None = None

    def __enter__(self) -> "OthersLoad":
        self._start = self._clocks()
        return self

    def __exit__(self, *_: object) -> None:
        end = self._clocks()
        if self._start and end and end[0] > self._start[0]:
            wall, busy, ours = (after - before for after, before in zip(end, self._start, strict=True))
            self.cores = round(max(busy - ours, 0.0) / wall, 2)

    @staticmethod
    def _clocks() -> tuple[float, float, float] | None:
        """Seconds of wall-clock time, of CPU time on all cores, and of CPU time of this process and its descendants."""
        try:
            fields = Path("/proc/stat").read_text().split()[1:9]  # of the first line, all cores together
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields)
            ticks = os.sysconf("SC_CLK_TCK")
            ours = sum(os.times()[:4]) + sum(cpu_ticks(pid) for pid in descendants()) / ticks
            return time.perf_counter(), (user + nice + system + irq + softirq + steal) / ticks, ours
        except (OSError, ValueError):
            return None


def _stat(pid: str) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on, after the name, which may contain spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # the process has ended
        return []


def cpu_ticks(pid: str) -> int:
    """Of CPU time that a process took, with its children that have ended."""
    fields = _stat(pid)
    return sum(map(int, fields[11:15])) if fields else 0  # utime, stime, and both of children


def descendants() -> list[str]:
    """The processes that this one started, and theirs."""
    parents = {pid: fields[1] for pid in os.listdir("/proc") if pid.isdigit() and (fields := _stat(pid))}
    descendants, level = [], [str(os.getpid())]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        descendants += level
    return descendants


def slug(name: str) -> str:
    """The name of a device's folder under `data/results`: lower case with dashes."""
    name = re.sub(r"\((r|tm)\)", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def installed(peer: str) -> str | None:
    """The version of an optional dependency, or None. Imports nothing.

    A dependency is what "not installed: …" names in a row's status: a package by the name that users install (or
    import), a program, a library or a header. A package counts as installed if its module is found, whichever package
    provides it (several provide `cv2`); one without a module of its own (`onnxruntime-gpu`) if it is listed among the
    installed packages. A status with a remark after the name, as of a broken package, names nothing that is found
    here. The package index has an unrelated project called `apex`; only NVIDIA's, which has `apex.optimizers`, counts.
    """
    if peer in (outside := _outside_python()):
        return "unknown version" if outside[peer]() else None
    module = MODULES.get(peer, peer)
    if not module.isidentifier():
        return _distribution(peer)
    spec = importlib.util.find_spec(module)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or [])
    if peer == "apex" and not any((Path(folder) / "optimizers").is_dir() for folder in folders):
        return None
    return _distribution(peer) or "unknown version"


NOT_INSTALLED = "not installed: "
NO_ASSERTIONS = "python -O (or PYTHONOPTIMIZE) removes assert statements, by which results are checked: run it without"


def missing_because(*needs: str, device: torch.device | None = None) -> str:
    """Why something can't run on this device (default: the machine's), as text for a row's status; "" if it can.

    A need is `"CUDA"`, `"CPU"`, `"compute capability 8.9"` (or another), `"native bf16"`, `"torch 2.9"` (or another
    version), or something that `installed` looks for. The text is about the first unmet need.
    """
    kind = (device or _device()).type
    for need in needs:
        if need == "native bf16":
            if kind == "cuda" and torch.cuda.get_device_capability() < (8, 0):
                return "needs a GPU with bf16 units (compute capability 8.0)"
            if kind == "cpu" and not multiplies_half():
                return "needs a CPU with instructions for bf16 (AVX-512): others take some 90 times as long as in fp32"
        elif need == "CUDA":
            if kind != "cuda":
                return "needs CUDA"
        elif need == "CPU":
            if kind != "cpu":
                return "runs on the CPU only"
        elif need.startswith("compute capability "):
            least = tuple(map(int, need.rpartition(" ")[2].split(".")))
            if kind != "cuda" or torch.cuda.get_device_capability() < least:
                return f"needs a GPU of {need}"
        elif need.startswith("torch "):
            least = tuple(map(int, need.rpartition(" ")[2].split(".")))
            if tuple(map(int, torch.__version__.split(".")[:2])) < least:
                return f"needs {need}, and this is {torch.__version__}"
        elif installed(need) is None:
            return NOT_INSTALLED + need
    return ""


@functools.cache
def environment() -> dict[str, str]:
    """The provenance of a measurement: GPU, driver, versions, CPU, optional packages, date and commit."""
    on_gpu = torch.cuda.is_available()
    facts = {
        "gpu": device_name(),
        "gpu_memory_gib": f"{_gpu_bytes() / 2**30:.1f}" if on_gpu else "",
        "driver": _driver() if on_gpu else "none",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda or "none"),
        "cudnn": str(torch.backends.cudnn.version()) if on_gpu else "none",
        "python": platform.python_version(),
        "cpu": cpu.name(),
        "cpu_cores": str(os.cpu_count()),
        "platform": platform.platform(terse=True),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }
    facts |= {peer: installed(peer) or "not installed" for peer in PEERS}
    return facts


@functools.cache
def commit() -> str:
    """The commit of this package, with `+` if the work tree differs from it.

    Where git doesn't track it (a copy that is installed may lie in another repository) it is a hash of the package's
    sources: `source-1a2b3c4d5e6f`.
    """
    package = Path(__file__).resolve().parents[1]
    try:
        git = functools.partial(_output, "git", "-C", str(package))
        git("ls-files", "--error-unmatch", "--", __file__)
        return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        digest = hashlib.sha256()
        for path in sorted(package.rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
        return "source-" + digest.hexdigest()[:12]


def check_assertions() -> None:
    """A ValueError under `python -O`: without `assert` statements, wrong results pass for right ones."""
    if not __debug__:
        raise ValueError(NO_ASSERTIONS)


_device = device  # for functions that have an argument `device`


def _outside_python() -> dict[str, Callable[[], bool]]:
    """The dependencies that aren't Python packages, each with a function that looks for it."""
    return {
        "C++ compiler": lambda: shutil.which(os.environ.get("CXX") or CXX) is not None,
        "Python.h": _has_python_header,
        "pypy3": lambda: shutil.which("pypy3") is not None,
    }


def _distribution(name: str) -> str | None:
    """The version of an installed package, by its name on the package index."""
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _has_python_header() -> bool:
    """Whether extensions of this Python can be compiled: many systems have the header in a separate package."""
    named = [os.environ.get(variable, "") for variable in ("CPATH", "CPLUS_INCLUDE_PATH")]
    folders = [*map(sysconfig.get_path, ("include", "platinclude")), *os.pathsep.join(named).split(os.pathsep)]
    return any((Path(folder) / "Python.h").is_file() for folder in folders if folder)


def _driver() -> str:
    try:
        return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
