"""Everything in this folder needs CUDA."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.path.parts and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture
def no_waiting():
    """Turns a wait for the device into an error, from the call of what is given on."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
