"""The part of an epoch that a process gives: its rank, its DataLoader worker, and how far its pass has come.

Samplers and datasets follow the same rules. Rank and number of ranks are torch.distributed's unless given. An epoch is
what `set_epoch` says, as in torch's `DistributedSampler`: a pass doesn't advance it. A state resumes inside an epoch.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import get_worker_info

from .arguments import check_at_least


def rank_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and number of ranks: as given, else torch.distributed's, else 0 of 1.

    A ValueError if there is no such rank.
    """
    if world_size is None:
        world_size = torch.distributed.get_world_size() if _in_group() else 1
    if rank is None:
        rank = torch.distributed.get_rank() if _in_group() else 0
    check_at_least(0, rank=rank)
    check_at_least(1, world_size=world_size)
    if rank >= world_size:
        raise ValueError(f"rank is {rank}; of {world_size} ranks the last is {world_size - 1}")
    return rank, world_size


def _in_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def worker_of() -> tuple[int, int]:
    """This DataLoader worker and how many there are; 0 of 1 outside of one."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def check_identity(state: Mapping[str, Any], identity: Mapping[str, Any], kind: str) -> None:
    """A ValueError unless a state was made with the same arguments and data."""
    differing = sorted(name for name, value in identity.items() if state.get(name) != value)
    if differing:
        raise ValueError(f"the state is of another {kind}; it differs in {', '.join(differing)}")
    check_at_least(0, epoch=state.get("epoch"), position=state.get("position"))


class Place:
    """The epoch of the next pass of a sampler or an iterable dataset, and the place that the last one has reached.

    The epoch lies in shared memory, so that `set_epoch` reaches workers that live on. The place is each process's own.

    Ranks that aren't given are asked for at each use: Lightning starts the process group after loaders are made.
    """

    def __init__(self, rank: int | None = None, world_size: int | None = None) -> None:
        self._given = rank, world_size
        rank_of(rank, world_size)  # a rank that there isn't is an error here
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._resume: dict[str, int] | None = None  # where the next pass begins, if not at the beginning
        self._reached = (0, 0)  # epoch and position

    @property
    def ranks(self) -> tuple[int, int]:
        """This rank and how many there are."""
        return rank_of(*self._given)

    def __getstate__(self) -> dict[str, Any]:
        """A spawned worker has no process group, so it takes the ranks of the process that started it."""
        return self.__dict__ | {"_given": self.ranks if _in_group() else self._given}

    @property
    def epoch(self) -> int:
        return int(self._epoch) if self._resume is None else self._resume["epoch"]

    def set_epoch(self, epoch: int) -> None:
        """Another epoch than the present begins at its beginning; the same one keeps the place that was loaded."""
        check_at_least(0, epoch=epoch)
        self._epoch.fill_(epoch)
        if self._resume is not None and self._resume["epoch"] != epoch:
            self._resume = None
        if self._reached[0] != epoch:
            self._reached = epoch, 0

    def state(self) -> dict[str, int]:
        if self._resume is not None:
            return dict(self._resume)
        epoch, position = self._reached
        return {"epoch": epoch, "position": position}

    def load(self, state: Mapping[str, Any], ended: bool) -> None:
        """Let the next pass begin there. `ended` says that nothing is left of it.

        A `StatefulDataLoader` loads when it is iterated, after `set_epoch`. A pass that has ended was followed by
        that call, so its epoch doesn't become the present one.
        """
        self._resume = {name: state[name] for name in ("epoch", "position")}
        if not ended:
            self._epoch.fill_(state["epoch"])

    def begin(self) -> tuple[int, dict[str, int] | None]:
        """The epoch of a pass that begins now, and where it resumes, if it does: until one has begun (`reach`)."""
        return self.epoch, self._resume

    def reach(self, epoch: int, position: int) -> None:
        """Called by a pass when it begins, and before it gives an item."""
        self._reached, self._resume = (epoch, position), None
