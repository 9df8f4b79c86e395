"""Workers of a test's loaders end with it: as garbage, they would be waited for in a later one."""

import pytest

from helpers.lab.memory import end_loader_workers


@pytest.fixture(autouse=True)
def _no_workers_left():
    yield
    end_loader_workers()
