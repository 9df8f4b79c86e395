import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Threads only get in each other's way on tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
