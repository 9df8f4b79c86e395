"""Which samples share a sequence: bin packing, so that sequences are full, and an epoch's plan. No token is looked at.

    packs = pack(lengths, capacity=2048, strategy="best-fit")
    packs[0]                    # the indices of the samples in the first pack
    len(packs), packs.fill      # how many packs, and what share of their capacity is used

    greedy      next fit, in the order given: a pack closes when the next sample does not fit. It looks at one pack
                only, so that it can run on a stream, and leaves about half a sample of room in each.
    first-fit   longest sample first, into the first pack that has room. Never more than 11/9 of the fewest possible
                packs, plus one.
    best-fit    longest sample first, into the pack in which the least room remains. The same bound.

No sample is cut, and none is left out. All three give exactly what the textbook's loop over samples and packs gives;
see `_fit_decreasing` for why they need not run it.
"""

from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from ..lab.arguments import check_at_least, check_choice
from .datasets import Lengths, checked_lengths

STRATEGIES = ("greedy", "first-fit", "best-fit")

Run = tuple[int, int, int]  # `bins` packs from pack `start` on, each of which takes `each` samples


@dataclass(frozen=True, eq=False)
class Packs:
    """Samples in packs, as flat arrays: pack i holds the samples `order[offsets[i] : offsets[i + 1]]`.

    8 bytes a sample and 16 a pack. `packs[i]` is a view.
    """

    order: np.ndarray  # (samples,) each index once
    offsets: np.ndarray  # (packs + 1,)
    loads: np.ndarray  # (packs,) tokens in each
    capacity: int

    def __len__(self) -> int:
        return len(self.loads)

    def __getitem__(self, index: int) -> np.ndarray:
        index = range(len(self))[index]
        return self.order[self.offsets[index] : self.offsets[index + 1]]

    def __repr__(self) -> str:
        return f"<Packs: {len(self.order):,} samples in {len(self):,} packs of {self.capacity:,}, {self.fill:.2%} full>"

    @property
    def fill(self) -> float:
        """The share of the capacity that is used; nan if there are no packs."""
        return int(self.loads.sum()) / (len(self) * self.capacity) if len(self) else float("nan")


def pack(lengths: Lengths, capacity: int, strategy: str = "best-fit") -> Packs:
    """Put samples of these lengths into packs of `capacity` tokens; see the module for the strategies.

    Samples longer than `capacity` are an error: cut them first. Of equally long samples the one that stands first is
    packed first, so shuffled lengths give other packs. Empty samples never open a pack, unless there is no other.

    A million lengths of text take 0.1 s on one core, whatever the capacity. On top of sorting, greedy costs a step
    for each pack, and the others 2 to 4 µs for each *run*, neighbouring packs that take equally many samples of one
    length. There are some thousands for text; at worst as many as samples, or as the square of the number of distinct
    lengths, whichever is less. A million lengths that all differ take 2 to 5 s.
    """
    lengths = checked_lengths(lengths)
    check_at_least(1, capacity=capacity)
    check_choice(STRATEGIES, strategy=strategy)
    if len(lengths) and lengths.max() > capacity:
        longest = int(lengths.argmax())
        raise ValueError(
            f"length {longest} is {lengths[longest]}; it must be at most the capacity, {capacity}: cut the sample first"
        )
    if strategy == "greedy":
        order, offsets = np.arange(len(lengths)), _follow(_reach(lengths, capacity))
    else:
        order, offsets = (best_fit if strategy == "best-fit" else first_fit)(lengths, capacity)
    ends = np.concatenate([[0], np.cumsum(lengths[order])])
    return Packs(order, offsets, np.diff(ends[offsets]), capacity)


def _reach(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """For each sample, the first after it that no longer fits into a pack that begins with it."""
    ends = np.cumsum(lengths)
    capacity = min(capacity, int(lengths.sum()))  # so that no sum overflows
    return np.searchsorted(ends, ends - lengths + capacity, side="right")


def _follow(after: np.ndarray) -> np.ndarray:
    """The places that are visited from 0 on, when `after[i]` follows i, up to the end."""
    places, jumps = [0], after.tolist()
    while places[-1] < len(jumps):
        places.append(jumps[places[-1]])
    return np.array(places)


def first_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples pack by pack, and where each pack begins and the last ends."""
    return _decreasing(lengths, capacity, tightest=False)


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples pack by pack, and where each pack begins and the last ends."""
    return _decreasing(lengths, capacity, tightest=True)


def _decreasing(lengths: np.ndarray, capacity: int, tightest: bool) -> tuple[np.ndarray, np.ndarray]:
    order = stable_argsort(lengths.max(initial=0) - lengths)  # the longest first
    descending = lengths[order]
    firsts = np.flatnonzero(np.diff(descending, prepend=-1))  # where a length begins
    counts = np.diff(firsts, append=len(order))
    runs = _fit_decreasing(descending[firsts].tolist(), counts.tolist(), capacity, tightest)

    start, bins, each = np.array(runs, dtype=np.int64).reshape(-1, 3).T  # (runs,)
    begin = np.cumsum(bins) - bins
    target = np.repeat(start - begin, bins) + np.arange(bins.sum())  # (visits,) the pack that is visited
    taken = np.repeat(each, bins)  # by it, from the samples in their order
    where = np.cumsum(taken) - taken

    visits = stable_argsort(target)
    sizes = taken[visits]
    ends = np.cumsum(sizes)
    place = np.repeat(where[visits] - ends + sizes, sizes) + np.arange(len(order))
    packs_begin = np.flatnonzero(np.diff(target[visits], prepend=-1))
    return order[place], np.append((ends - sizes)[packs_begin], len(order))


def _fit_decreasing(lengths: list[int], counts: list[int], capacity: int, tightest: bool) -> list[Run]:
    """First fit or best fit over distinct lengths, the longest first: who takes how many, in the order of the samples.

    The chosen pack stays chosen: after taking a sample it is still the first that has room, and still the tightest.
    So, of one length, it takes as many as it holds at once. And packs with the same room that stand side by side take
    equally many, one after another, so such a run is treated as one. Each length opens or splits one run at most,
    and adds two at most.

    The next to be chosen is the first run that has room for the present length, or the tightest and of those the first,
    and a heap knows which. A run that is too full waits in another heap until lengths have come down to its room.
    """
    runs: list[Run] = []
    roomy: list[tuple[int, int, int, int]] = []  # (rank, first pack, packs, room of each)
    too_full: list[tuple[int, int, int]] = []  # (−room, first pack, packs)
    opened = 0

    def add_roomy(start: int, bins: int, room: int) -> None:
        heappush(roomy, (room if tightest else 0, start, bins, room))

    for length, count in zip(lengths, counts, strict=True):
        while too_full and -too_full[0][0] >= length:
            room, start, bins = heappop(too_full)
            add_roomy(start, bins, -room)
        while count:
            if roomy:
                _, start, bins, room = heappop(roomy)
                each = room // length if length else count
            else:
                each = capacity // length if length else count
                start, bins, room = opened, -(-count // each), capacity
                opened += bins
            full, rest = divmod(count, each)
            if full >= bins:
                full, rest = bins, 0
            count -= full * each + rest
            if full:
                runs.append((start, full, each))
                heappush(too_full, (each * length - room, start, full))
            if rest:
                runs.append((start + full, 1, rest))
                add_roomy(start + full, 1, room - rest * length)
                full += 1
            if full < bins:
                add_roomy(start + full, bins - full, room)
    return runs


def stable_argsort(keys: np.ndarray) -> np.ndarray:
    """`argsort(kind="stable")` for whole numbers from 0 on.

    The index is made a part of the key, and the keys, all different, are sorted in place: 15 ms for a million, while
    sorting indices by key takes 130 ms.
    """
    count = len(keys)
    if int(keys.max(initial=0)) >= 2**62 // max(count, 1):
        return np.argsort(keys, kind="stable")
    both = keys * count + np.arange(count)
    both.sort()
    return both % max(count, 1)


@dataclass(frozen=True, eq=False)
class Plan:
    """Sequence i holds the first `sizes` tokens of each of the samples `order[begins[i] : ends[i]]`."""

    order: np.ndarray  # (documents,) indices of samples
    sizes: np.ndarray  # (documents,)
    begins: np.ndarray  # (sequences,)
    ends: np.ndarray  # (sequences,)

    def __len__(self) -> int:
        return len(self.begins)


def plan_stream(order: np.ndarray, lengths: np.ndarray, max_length: int, batch_size: int | None, last: str) -> Plan:
    """The samples in this order, cut into sequences as they come; see `SequencedDataset` for `last`.

    Where a sequence ends is computed for each place at which one might begin, and only then are the ends followed.
    0.2 s for a million samples, most of it a step in Python for each sequence and a look-up for each sample.
    """
    sizes = np.minimum(lengths, max_length)[order]
    count, places = len(order), np.arange(len(order))
    at_most = count + 1 if batch_size is None else batch_size
    after = np.minimum(_reach(sizes, max_length), places + at_most)
    if last == "carry":
        bounds = _follow(after)
        return Plan(order, sizes, bounds[:-1], bounds[1:])

    ends = np.cumsum(sizes)
    room = max_length - (ends[after - 1] - ends + sizes)  # that a sequence from here leaves
    crosses = (after < count) & (after < places + at_most) & (room > 0)  # there is a sample that doesn't fit
    bounds = _follow(after + crosses)
    begins = bounds[:-1][crosses[bounds[:-1]]]
    crossing = after[begins]
    if last == "crop":
        sizes[crossing] = room[begins]
        return Plan(order, sizes, bounds[:-1], bounds[1:])
    remaining = np.ones(count, dtype=bool)
    remaining[crossing] = False
    bounds = np.append(0, np.cumsum(remaining))[bounds]
    return Plan(order[remaining], sizes[remaining], bounds[:-1], bounds[1:])


def plan_packs(
    order: np.ndarray, lengths: np.ndarray, max_length: int, strategy: str, random: np.random.Generator
) -> Plan:
    """The samples in the packs of a strategy, which breaks ties by this order; the packs in random order."""
    packs = pack(lengths[order], max_length, strategy)
    order, shuffled = order[packs.order], random.permutation(len(packs))
    return Plan(order, lengths[order], packs.offsets[:-1][shuffled], packs.offsets[1:][shuffled])


def split_evenly(plan: Plan, ranks: int) -> Plan:
    """Split sequences with the most documents in two until `ranks` divides how many there are.

    If each is down to a single document before that, it stays as it is. O(ranks · sequences).
    """
    begins, ends = plan.begins, plan.ends
    for _ in range(-len(plan) % ranks):
        widest = int((ends - begins).argmax())
        middle = (begins[widest] + ends[widest]) // 2
        if middle == begins[widest]:
            return plan
        begins, ends = np.insert(begins, widest + 1, middle), np.insert(ends, widest, middle)
    return replace(plan, begins=begins, ends=ends)
