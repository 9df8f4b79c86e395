import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packed_cases import LENGTH_LISTS, MAX_LENGTH

from helpers.batching.packing import STRATEGIES, pack, plan_stream
from helpers.text.synthetic import draw_lengths


def next_fit(lengths, capacity):
    packs, load = [], 0
    for index, length in enumerate(lengths):
        if not packs or load + length > capacity:
            packs.append([])
            load = 0
        packs[-1].append(index)
        load += length
    return packs


def decreasing(lengths, capacity, choose):
    packs, rooms = [], []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = [number for number, room in enumerate(rooms) if room >= lengths[index]]
        if not fitting:
            fitting = [len(packs)]
            packs.append([])
            rooms.append(capacity)
        chosen = choose(fitting, rooms)
        packs[chosen].append(index)
        rooms[chosen] -= lengths[index]
    return packs


def first_fit(lengths, capacity):
    return decreasing(lengths, capacity, lambda fitting, rooms: fitting[0])


def best_fit(lengths, capacity):
    return decreasing(lengths, capacity, lambda fitting, rooms: min(fitting, key=rooms.__getitem__))


TEXTBOOK = {"greedy": next_fit, "first-fit": first_fit, "best-fit": best_fit}


@st.composite
def problems(draw):
    """Lengths and a capacity: few lengths that repeat, all kinds of lengths, heavy tails, none at all."""
    capacity = draw(st.integers(1, 40) | st.integers(1, 10**12))
    longest = draw(st.integers(0, capacity))
    few = st.sampled_from(draw(st.lists(st.integers(0, longest), min_size=1, max_size=4)))
    heavy = st.integers(0, 40).map(lambda halvings: capacity >> halvings)
    return draw(st.lists(draw(st.sampled_from([few, st.integers(0, longest), heavy])), max_size=120)), capacity


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(deadline=None, max_examples=80)
@given(problems())
@example(([], 5))
@example(([0, 0], 5))
@example(([0, 5, 0], 5))
@example(([7], 2**63 - 1))
def test_packs_are_the_textbooks(strategy, problem):
    lengths, capacity = problem
    packs = pack(lengths, capacity, strategy)
    expected = TEXTBOOK[strategy](lengths, capacity)
    assert [indices.tolist() for indices in packs] == expected
    assert packs.loads.tolist() == [sum(lengths[index] for index in indices) for indices in expected]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_many_lengths_are_packed_without_a_step_for_each_pair(strategy):
    lengths = draw_lengths(200_000, seed=0)  # 0.02 s; a step for each sample and pack would be minutes
    packs = pack(lengths, 8192, strategy)
    assert np.array_equal(np.sort(packs.order), np.arange(len(lengths)))
    assert packs.loads.max() <= 8192
    assert strategy == "greedy" or packs.fill >= 0.995


def test_a_pack_is_a_view_and_counts_as_a_list_does():
    packs, none = pack([3, 3, 2, 2], 5), pack([], 5)
    assert (len(packs), packs.fill) == (2, 1.0)
    assert packs[0].base is packs.order
    assert packs[-1].tolist() == packs[1].tolist() == [1, 3]
    assert "2 packs of 5, 100.00% full" in repr(packs)
    with pytest.raises(IndexError):
        packs[2]
    assert (len(none), list(none)) == (0, []) and np.isnan(none.fill)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, -3], 5), "length 1 is -3; lengths must be whole numbers"),
        (([1, 6, 9], 5), "length 2 is 9; it must be at most the capacity, 5"),
        (([1], 0), "capacity is 0; it must be an integer of at least 1"),
        (([1], 1.5), "capacity is 1.5"),
        (([1], 5, "worst-fit"), "strategy is 'worst-fit'; valid: 'greedy', 'first-fit', 'best-fit'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        pack(*arguments)


def reference(lengths, max_length, batch_size, last):
    """What becomes of a stream of samples: sequences of (sample, how much of it)."""
    sequences, current, room = [], [], max_length
    for index, length in enumerate(lengths):
        length = min(length, max_length)
        full = room == 0 or len(current) == batch_size
        if length > room and last != "carry" and not full:
            if last == "crop":
                current.append((index, room))
            sequences.append(current)
            current, room = [], max_length
            continue
        if length > room or len(current) == batch_size:
            sequences.append(current)
            current, room = [], max_length
        current.append((index, length))
        room -= length
    return sequences + ([current] if current else [])


@pytest.mark.parametrize("last", ["carry", "crop", "drop"])
@settings(deadline=None, max_examples=80)
@given(LENGTH_LISTS, st.none() | st.integers(1, 6), st.integers(0, 30))
def test_sequences_close_as_the_loop_over_samples_says(last, lengths, batch_size, longer):
    lengths = [length + longer * (last == "crop" and length % 3 == 0) for length in lengths]
    plan = plan_stream(np.arange(len(lengths)), np.array(lengths), MAX_LENGTH, batch_size, last)
    documents = list(zip(plan.order.tolist(), plan.sizes.tolist(), strict=True))
    sequences = [documents[begin:end] for begin, end in zip(plan.begins, plan.ends, strict=True)]
    assert sequences == reference(lengths, MAX_LENGTH, batch_size, last)
