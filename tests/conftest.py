"""Without CUDA the Triton kernels run in Triton's interpreter, which has to be chosen before Triton is imported."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

pytest_plugins = ["helpers.guard.plugin"]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background: all that tests start would, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the tensors are small: a second thread costs more than it brings,
os.environ["OMP_NUM_THREADS"] = "1"  # in kernels and commands that tests start, too
os.environ["KINETO_LOG_LEVEL"] = "6"  # some builds of torch print a line whenever a profiler starts or stops
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure():
    """A small product stands for the machine's ceiling, which many rows take along: their rates are of no interest.

    The rate beside rows doesn't vary: that of a busy machine would have them measured again. Every CPU counts as having
    instructions for bf16.
    """
    from helpers.lab import ceilings, machine

    matmul = ceilings.matmul
    ceilings.matmul = lambda size, dtype, **_: matmul(min(size, 128), dtype)
    ceilings.rate_beside = lambda: 0.1
    machine.multiplies_half = lambda: True


# Begun first, so that the others fill the time beside them and no worker is left alone with one at the end.
LONGEST = ("test_notebooks.py", "test_report_build.py", "test_backends.py", "test_ranks.py", "test_try_script.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_terminal_summary(terminalreporter):
    """Name the sentences of the committed notebooks that their records no longer bear: the work isn't done with them.

    It fails no test, as whoever measures isn't the one who reads.
    """
    from helpers.book.build import outdated, read
    from helpers.lab.files import project_root

    for path in sorted((project_root() / "notebooks").glob("*.ipynb")):
        for sentence in outdated([read(path)]):
            terminalreporter.write_line(f"{path.name}: no longer so, by its records: {sentence}")


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _own_folders(tmp_path_factory):
    """Sessions side by side share no pictures and don't wait for each other's measurements, which are of no use."""
    from helpers.book import runner  # not above: it imports what the lines there set up

    os.environ["HELPERS_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    runner.LOCK = tmp_path_factory.mktemp("lock") / "measure.lock"


@pytest.fixture(autouse=True, scope="session")
def _short_turns():
    """Comparisons in tests are about what is compared, not about its time."""
    from helpers.lab import timing

    timing.TURN_S = 0.005


@pytest.fixture(autouse=True, scope="session")
def _same_rates():
    """Products in bf16 count as no faster than in fp32, so that no diagnosis depends on this CPU's units.

    Fused attention counts as three times as fast, but of short sequences.
    """
    from helpers.script import rates

    rates._fastest_s = lambda apply, shapes, *_: 3.0 if apply is rates._attention and shapes[0][2] > 128 else 1.0


@pytest.fixture
def compiler():
    """Skips what compiles on a machine that has nothing to compile with."""
    from helpers.compilers import backends

    if reason := backends.missing_because(backends.COMPILE):
        pytest.skip(reason)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of records of its own, empty."""
    monkeypatch.setenv("HELPERS_RESULTS", str(tmp_path))
    return tmp_path


@pytest.fixture
def made_up_gpu(monkeypatch):
    """Make torch name a GPU that isn't there: `made_up_gpu((7, 5), gib=15)`. Nothing can be computed on it."""

    def make(capability: tuple[int, int] = (9, 0), gib: float = 80.0, built: tuple[str, ...] = ("sm_75", "sm_90")):
        facts = SimpleNamespace(total_memory=int(gib * 2**30))
        for name, answer in {
            "is_available": True,
            "get_device_capability": capability,
            "get_device_name": "NVIDIA Made-up",
            "get_arch_list": list(built),
            "current_device": 0,
            "get_device_properties": facts,
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 1)  # a build without CUDA has none
        forget()

    from helpers.lab import machine  # not above: it imports torch's parts that read what those lines set

    def forget() -> None:
        for cached in (machine.environment, machine.without_kernels):
            cached.cache_clear()

    yield make
    monkeypatch.undo()
    forget()
