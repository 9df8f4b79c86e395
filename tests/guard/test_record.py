"""What is more and less than a record says, by how much, and where: of counts made by hand."""

import linecache
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.guard.counting import CALLS, FLOPS, LAUNCHES, MOVED, OPERATORS, PADDING, PEAK, STORED, WAITS, Counts
from helpers.guard.places import source
from helpers.guard.record import POSITIONS, _dumped, compare, entry

TEXT = ["for batch in loader:\n", "    loss = model(batch)\n", "    loss.backward()\n", "    print(loss)\n"]
OUTER, MODEL, BACK, PRINT = (("/home/me/loop.py", number) for number in (1, 2, 3, 4))


@pytest.fixture(autouse=True)
def _loop():
    """The lines of a script that isn't there."""
    linecache.cache["/home/me/loop.py"] = (0, None, TEXT, "/home/me/loop.py")
    source.cache_clear()
    yield
    linecache.cache.pop("/home/me/loop.py")
    source.cache_clear()


def counts(numbers=(), steps=2, positions=0, masked=False, peak=0):
    """Counts of so many steps, from a step's numbers by counter and line."""
    made = Counts()
    made.steps, made.positions, made.peak, made.masked = steps, positions * steps, peak, masked
    for counter, lines in dict(numbers).items():
        times = 1 if counter == PEAK else steps
        made.lines[counter] = Counter({chain: number * times for chain, number in lines.items()})
    made.operators = Counter({"mm": made.lines[OPERATORS].total()})
    made.launches = made.lines[OPERATORS].total()
    return made


def compared(before, after, allow=None):
    return compare(entry(before), after, allow or {})


def test_an_entry_holds_a_steps_numbers_and_the_lines_of_a_twentieth_or_more():
    stored = {(OUTER, MODEL): 950.0, (OUTER, BACK): 45.0, (OUTER, PRINT): 5.0}
    made = counts({STORED: stored, OPERATORS: {(BACK,): 3}}, 4, 100)
    held = entry(made)
    assert held[STORED] == 1000 and held[POSITIONS] == 100 and held[OPERATORS] == 3
    assert held["operators by name"] == {"mm": 3}
    stored = {text: numbers[STORED] for text, numbers in held["lines"].items() if STORED in numbers}
    assert stored == {"loop.py: for batch in loader:": 1000, "loop.py: loss = model(batch)": 950}


def test_padding_is_a_share_of_the_positions():
    assert entry(counts({PADDING: {(MODEL,): 50.0}}, 3, 200))[PADDING] == 0.25
    assert entry(counts(steps=3))[PADDING] == 0


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([STORED, MOVED, CALLS, WAITS, FLOPS, OPERATORS]), st.integers(1, 300), st.integers(1, 300))
def test_what_grows_by_more_than_its_share_and_number_is_more_and_what_shrinks_by_as_much_is_less(name, was, now):
    least, share = {CALLS: (50, 0.5), STORED: (0, 0.01), MOVED: (0, 0.01)}.get(name, (0, 0))
    more, less = compared(counts({name: {(MODEL,): was}}), counts({name: {(MODEL,): now}}))
    assert (name in {each.counter for each in more}) == (now > was * (1 + share) + least)
    assert (name in {each.counter for each in less}) == (was > now * (1 + share) + least)


@pytest.mark.parametrize(
    ("allowed", "now", "fails"), [(0.5, 15, False), (0.5, 16, True), (2, 30, False), (2, 31, True)]
)
def test_a_share_may_be_allowed_and_of_nothing_that_number(allowed, now, fails):
    more, _ = compared(counts({WAITS: {(MODEL,): 10}}), counts({WAITS: {(MODEL,): now}}), {WAITS: allowed})
    assert bool(more) == fails
    of_nothing, _ = compared(counts(), counts({WAITS: {(MODEL,): now}}), {WAITS: 15})
    assert bool(of_nothing) == (now > 15)


@pytest.mark.parametrize(
    ("name", "was", "now", "shown"),
    [
        (STORED, 1000, 1023, "1,000 → 1,023 bytes a step"),
        (STORED, 1024, 3 * 1024**2, "0 → 3 MiB a step"),
        (MOVED, 1536, 2048, "1.5 → 2 KiB a step"),
        (STORED, 2**30, 3000 * 2**30, "1 → 3,000 GiB a step"),
        (FLOPS, 1500, 2_000_000, "0 → 2 million a step"),
        (FLOPS, 2 * 10**9, 150 * 10**9, "2 → 150 billion a step"),
        (WAITS, 0, 1500, "0 → 1,500 a step"),
    ],
)
def test_a_change_is_in_the_unit_of_the_larger_number(name, was, now, shown):
    (more,) = compared(counts({name: {(MODEL,): was}}), counts({name: {(MODEL,): now}}))[0]
    assert more.change == shown


def test_a_peak_is_of_no_step_and_padding_a_percentage():
    (peak,) = compared(counts(peak=2**20), counts({PEAK: {(MODEL,): 2.0**21}}, 5, peak=2**21))[0]
    assert peak.change == "1 → 2 MiB" and peak.lines == ("loop.py:2 loss = model(batch)",)
    before, after = (counts({PADDING: {(MODEL,): padded}}, positions=100, masked=True) for padded in (10, 30))
    (padding,) = compared(before, after)[0]
    assert padding.change == "10% → 30%"
    assert not compared(before, counts({PADDING: {(MODEL,): 15}}, positions=100, masked=True))[0]


def test_other_samples_of_as_many_positions_are_no_more_work_unless_a_mask_tells_them():
    before = counts({PADDING: {(MODEL,): 10}}, positions=100)
    assert compared(before, counts({PADDING: {(MODEL,): 60}}, positions=100)) == ((), ())
    for after in (
        counts({PADDING: {(MODEL,): 120}}, positions=200),
        counts({PADDING: {(MODEL,): 60}}, positions=100, masked=True),
    ):
        assert [each.counter for each in compared(before, after)[0]] == [PADDING]


def test_a_new_line_is_named_and_of_an_old_one_that_grew_that_one():
    before = counts({WAITS: {(OUTER, MODEL): 10.0}})
    (new,) = compared(before, counts({WAITS: {(OUTER, MODEL): 10.0, (OUTER, PRINT): 5.0}}))[0]
    assert new.lines == ("loop.py:4 print(loss)",)
    (grown,) = compared(before, counts({WAITS: {(OUTER, MODEL): 15.0}}))[0]
    assert grown.lines == ("loop.py:2 loss = model(batch)",)


def test_a_new_line_is_found_under_one_that_does_a_part_of_it_all():
    before = {(OUTER, BACK): 10.0, (OUTER, MODEL): 10.0}
    (new,) = compared(counts({WAITS: before}), counts({WAITS: before | {(OUTER, MODEL, PRINT): 10.0}}))[0]
    assert new.lines == ("loop.py:4 print(loss)",)


def test_more_operators_are_named_by_how_many_more_and_launches_by_their_lines():
    before, after = (
        counts({OPERATORS: {(OUTER, MODEL): 3.0}}),
        counts({OPERATORS: {(OUTER, MODEL): 3.0, (OUTER, BACK): 2.0}}),
    )
    by_counter = {each.counter: each for each in compared(before, after)[0]}
    assert by_counter[OPERATORS].operators == "mm +2"
    assert by_counter[LAUNCHES].change == "3 → 5 a step"
    assert by_counter[OPERATORS].lines == by_counter[LAUNCHES].lines == ("loop.py:3 loss.backward()",)


def test_a_record_has_a_line_for_each_number():
    text = _dumped({"torch": {"script": {"numbers": {"memory": 1}, "lines": {"a.py": {"1": [2, 3]}}}}})
    lines = [line.strip() for line in text.splitlines()]
    assert '"memory": 1' in lines and '"a.py": {"1": [2, 3]}' in lines
