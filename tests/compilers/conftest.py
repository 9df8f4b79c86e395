import pytest

from helpers.compilers import missing_because
from helpers.compilers.backends import COMPILE


@pytest.fixture
def compiler():
    """Skips what compiles on a machine that has nothing to compile with."""
    if reason := missing_because(COMPILE):
        pytest.skip(reason)
