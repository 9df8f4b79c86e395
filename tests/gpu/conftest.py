"""Everything in this folder needs CUDA."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.path.parts and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
