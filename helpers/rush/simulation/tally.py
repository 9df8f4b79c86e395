"""Bytes by what they are for, and how they stood when they were the most."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Tally:
    parts: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    moment: str = ""  # of the peak

    def add(self, moment: str, **sizes: int) -> None:
        for part, size in sizes.items():
            self.parts[part] = self.parts.get(part, 0) + size
        if sum(self.parts.values()) > sum(self.peak.values()):
            self.peak, self.moment = dict(self.parts), moment

    def free(self, **sizes: int) -> None:
        for part, size in sizes.items():
            self.parts[part] -= size

    @contextlib.contextmanager
    def during(self, moment: str, **sizes: int) -> Iterator[None]:
        """What is there inside only."""
        self.add(moment, **sizes)
        yield
        self.free(**sizes)

    def touch(self, moment: str, **sizes: int) -> None:
        """What is there for a moment."""
        self.add(moment, **sizes)
        self.free(**sizes)
