"""Without CUDA the Triton kernels run in Triton's interpreter, which has to be chosen before Triton is imported."""

import os

import pytest
import torch

torch.set_num_threads(1)  # the tensors are small: a second thread costs more than it brings,
os.environ["OMP_NUM_THREADS"] = "1"  # in kernels and commands that tests start, too
os.environ["KINETO_LOG_LEVEL"] = "6"  # some builds of torch print a line whenever a profiler starts or stops
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


# Begun first, so that the others fill the time beside them and no worker is left alone with one at the end.
LONGEST = ("test_notebooks.py", "test_report_with_records.py", "test_backends.py", "test_distributed.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of records of its own, empty."""
    monkeypatch.setenv("HELPERS_RESULTS", str(tmp_path))
    return tmp_path
