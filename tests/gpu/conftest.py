"""Everything in this folder needs CUDA; what is marked `alone` has to have it, and the host, for itself."""

import os

import pytest
import torch


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.path.parts and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
        elif "gpu" in item.path.parts and item.get_closest_marker("alone") and "PYTEST_XDIST_WORKER" in os.environ:
            item.add_marker(pytest.mark.skip(reason="compares times: run without -n"))


@pytest.fixture
def no_waiting():
    """Turns a wait for the device into an error, from the call of what is given on."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
