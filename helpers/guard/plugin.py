"""A pytest plugin, installed as an entry point: the fixture `speed_guard`, and `--speed-guard-update`.

pytest imports this file whenever it starts, so it imports nothing of torch or of ours until a test uses the fixture.
"""

import contextlib
from typing import Any

import pytest

OPTION = "--speed-guard-update"
_NAMED = pytest.StashKey[dict]()  # the test of each block's name
TOLD = "speed guard"  # a test's property, which xdist's workers send along


def pytest_addoption(parser: pytest.Parser) -> None:
    with contextlib.suppress(ValueError):  # installed, and loaded from a checkout as well
        about = "write down anew what the guarded steps do, and print the difference"
        parser.getgroup("speed guard").addoption(OPTION, action="store_true", help=about)


@pytest.fixture
def speed_guard(request: pytest.FixtureRequest) -> Any:
    """`with speed_guard("train step", steps=3): step()` fails when the block has more to do than was written down.

    `speed_guard.json` beside the test holds what was, and the first run writes it. The block runs several times.
    """
    from .blocks import Guard
    from .record import FILE

    node = request.node
    named = request.config.stash.setdefault(_NAMED, {})

    def tell(text: str) -> None:
        node.user_properties.append((TOLD, text))

    update = request.config.getoption(OPTION)
    guard = Guard(node.path.with_name(FILE), f"{node.path.name}, ", update=update, tell=tell)

    def guarded(name: str, **options: Any) -> Any:
        first = named.setdefault((node.path, name), node.nodeid)
        if first != node.nodeid:
            raise ValueError(f"{first} has a block named {name!r}, too: give each its own name")
        return guard(name, **options)

    return guarded


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [each for kind in terminalreporter.stats.values() for each in kind if getattr(each, "when", "") == "call"]
    lines = [text for report in reports for name, text in report.user_properties if name == TOLD]
    told, terminalreporter.config.speed_guard_told = getattr(terminalreporter.config, "speed_guard_told", False), True
    if lines and not told:  # installed, and loaded from a checkout as well
        terminalreporter.section("speed guard")
        terminalreporter.write("".join(f"{line}\n" for line in lines))
