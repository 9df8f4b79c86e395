"""Numbers that sentences quote, and the sentences and claims that a notebook makes of them."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.book import notebook
from helpers.book.notebook import claim, reading, say, when
from helpers.book.table import ColumnError, OnMachine, Results, Table, table, with_declared
from helpers.book.values import (
    TIMES,
    Number,
    derived,
    judged,
    lacking,
    number,
    of_class,
    of_kernels,
    over,
    paired,
    pick,
    reach_of_median,
    share_of,
    speedup,
)
from helpers.lab.estimate import EFFECT, NONE, UNDECIDED

TRIAL = {"ratio": 2.43, "low": 2.31, "high": 2.54, "pairs": 12}
ROWS = pd.DataFrame({"variant": ["eager", "fused"], "median_ms": [6.0, 2.0]})


@pytest.fixture
def shown(monkeypatch):
    """The texts that a cell shows, and whether the report takes them."""
    texts = []

    def display(markdown, metadata=None):
        texts.append((markdown.data, (metadata or {}).get("helpers", {}).get("report", True)))

    monkeypatch.setattr(notebook, "display", display)
    return texts


def test_a_trials_ratio_is_told_with_its_interval_and_pairs():
    ratio = paired(TRIAL)
    assert f"{ratio}" == "2.4× (2.3 to 2.5, 12 pairs)"
    assert f"{ratio:brief 2}" == "2.43×"


def test_a_ratio_of_two_medians_says_that_it_is_unpaired():
    ratio = over(pick(ROWS, "median_ms", variant="eager"), pick(ROWS, "median_ms", variant="fused"))
    assert f"{ratio}" == "3.0× (unpaired)" == f"{ratio:brief}"


def test_a_ratio_of_two_medians_takes_its_interval_from_the_spread_of_both():
    spread = ROWS.assign(p20_ms=ROWS["median_ms"] * 0.9, p80_ms=ROWS["median_ms"] * 1.1, n=20)
    eager, fused = (pick(spread, "median_ms", variant=name) for name in ROWS["variant"])
    assert f"{eager} {over(eager, fused)}" == "6.00 3.0× (2.7 to 3.3, unpaired)"
    apart = over(eager, fused, luck=0.1)  # of processes, which no number of runs averages out
    assert apart.low < over(eager, fused).low and apart.high > over(eager, fused).high


@given(st.integers(0, 2**32), st.sampled_from([10, 20, 50]))
@settings(max_examples=20, deadline=None)
def test_the_interval_of_two_medians_holds_the_true_ratio(seed, runs):
    times = np.random.default_rng(seed).lognormal(0, 0.1, (2, 100, runs))
    held = 0
    for pair in np.moveaxis(times, 1, 0):
        ends = np.quantile(pair, (0.2, 0.5, 0.8), axis=1).T
        ratio = over(*(Number(p50, reach=reach_of_median(p20, p80, runs)) for p20, p50, p80 in ends))
        held += ratio.low <= 1 <= ratio.high
    assert held >= 85  # of 100; 95 are expected


def test_arithmetic_needs_no_interval():
    assert f"{derived(11 / 9, 'eleven products for nine')}" == "1.22×"
    assert f"{over(derived(1, 'a', ''), derived(4, 'b', ''))}" == "0.25×"


@pytest.mark.parametrize(
    ("low", "high", "most", "least"),
    [
        (0.98, 1.0, "holds", "undecided"),
        (1.0, 1.04, "undecided", "holds"),
        (1.01, 1.04, "does not hold", "holds"),
        (None, None, "does not hold", "holds"),
    ],
)
def test_a_claim_is_decided_where_the_interval_leaves_the_limit(low, high, most, least):
    ratio = Number(1.01, "×", low, high)
    assert (ratio.at_most(1.0).outcome, ratio.at_least(1.0).outcome) == (most, least)


def test_a_row_that_is_missing_is_a_number_that_says_so():
    absent = pick(ROWS, "median_ms", variant="compiled")
    assert not absent.measured
    assert absent.at_most(1).outcome == "not measured"
    assert over(absent, pick(ROWS, "median_ms", variant="eager")).missing == "median_ms of variant compiled"
    assert number(absent) == "–"


def test_a_number_of_a_kernel_is_not_taken_from_a_host_bound_row(shown):
    fused = {"device_share": 0.95}
    assert of_kernels(paired(TRIAL), "the fused kernel", fused, {}).measured
    gain = of_kernels(paired(TRIAL), "the fused kernel", fused, {"device_share": 0.5})
    assert f"{gain}" == "[not measured: the fused kernel that isn't host-bound]"
    claim("twice", gain.at_least(2))
    assert shown == [("*Not measured:* twice: needs the fused kernel that isn't host-bound.", True)]


def test_a_renamed_column_raises_even_where_the_row_is_missing():
    for variant in ("eager", "compiled"):
        with pytest.raises(KeyError, match="mean_ms"):
            pick(ROWS, "mean_ms", variant=variant)


def test_two_rows_for_one_number_raise():
    with pytest.raises(ValueError, match="2 rows"):
        pick(ROWS, "median_ms")


def test_a_sentence_whose_number_is_missing_stays_out_of_the_report(shown):
    say("Both were timed.", f"Compiled takes {lacking('rung compile', 'ms')}.")
    assert ("Both were timed.", True) in shown
    (missing,) = [sentence for sentence, in_report in shown if not in_report]
    assert "not measured: rung compile" in missing


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (paired(TRIAL).at_least(2), "*Holds:* twice: 2.4× (2.3 to 2.5, 12 pairs); limit: at least 2.0×."),
        (paired(TRIAL).at_least(3), "*Does not hold:* twice: 2.4× (2.3 to 2.5, 12 pairs); limit: at least 3.0×."),
        (lacking("the ladder").at_least(3), "*Not measured:* twice: needs the ladder."),
    ],
)
def test_a_claim_tells_its_number_and_its_limit(verdict, text, shown):
    claim("twice", verdict)
    assert shown == [(text, True)]


TWICE = "It pays twice."


@pytest.mark.parametrize(("limit", "holds", "as_read"), [(2, True, True), (3, True, False), (3, False, True)])
def test_a_sentence_that_interprets_stands_while_its_records_bear_it(limit, holds, as_read, shown):
    bare = "*Does not hold:* 2.4× (2.3 to 2.5, 12 pairs); limit: at least 3.0×."
    claim(TWICE, paired(TRIAL).at_least(limit), holds=holds)
    assert shown[-1] == (TWICE if as_read else bare, True)
    assert shown[:-1] == ([] if as_read else [(f"*No longer so: {TWICE}*", False)])


def test_of_other_records_a_sentence_leaves_the_bare_outcome_and_is_in_no_list(shown, tmp_path, monkeypatch):
    monkeypatch.setenv("HELPERS_RESULTS", str(tmp_path))
    assert reading(TWICE, paired(TRIAL).at_least(2)) == "*Holds:* 2.4× (2.3 to 2.5, 12 pairs); limit: at least 2.0×."
    assert shown == []


def made(rows) -> Results:
    frame = pd.DataFrame(rows)
    return Results(Table("chapter", "table", lambda: None, {}, 1), frame)


def test_a_cell_runs_with_the_names_of_its_tables_or_says_what_to_run(shown):
    measured, empty = made([{"status": "ok", "ms": 2.0}]), made([])
    ran = []

    def numbers(rows):
        return SimpleNamespace(ms=pick(rows, "ms", "ms"))

    when(OnMachine(numbers, (measured,)))(lambda named: ran.append(f"{named.ms}"))
    when(OnMachine(numbers, (measured,)), OnMachine(numbers, (empty,)))(lambda *_: ran.append("both"))
    assert ran == ["2.00 ms"]
    assert shown == [("*Not measured yet. To measure it: `dlspeed measure chapter/table`.*", False)]
    with pytest.raises(AttributeError, match="it names: ms"):
        _ = OnMachine(numbers, (measured,)).seconds


@table(small=[{"size": 1}], columns=["ms", "peak_gib?"])
def declared(size):
    return dict.fromkeys(RETURNED, 1.0)


RETURNED: list[str] = []


@pytest.mark.parametrize("names", [["ms"], ["ms", "peak_gib"], ["ms", "device_share"]])
def test_declared_columns_are_measured(names):
    RETURNED[:] = names
    assert list(declared("small")) == ["size", "status", *names]


@pytest.mark.parametrize(("names", "message"), [(["median_ms", "ms"], "declares no"), (["peak_gib"], "lacks ms")])
def test_another_column_or_a_missing_one_is_an_error(names, message):
    RETURNED[:] = names
    with pytest.raises(ColumnError, match=message):
        declared("small")


def test_records_without_a_declared_column_are_an_error_when_they_are_read():
    rows = pd.DataFrame({"size": [1], "status": ["ok"], "ms": [1.0]})
    assert with_declared(declared, rows)["peak_gib"].isna().all()
    with pytest.raises(ColumnError, match="lack ms"):
        with_declared(declared, rows.rename(columns={"ms": "median_ms"}))


@pytest.mark.parametrize(
    ("verdict", "judgement"),
    [("none above 4.3 %", (NONE, 0.043)), ("faster", (EFFECT, None)), (float("nan"), (EFFECT, None))],
)
def test_what_a_trial_decided_stands_whatever_its_shown_interval_would_say(verdict, judgement):
    row = pd.Series({"ratio": 0.9796, "low": 0.9656, "high": 0.9938, "pairs": 11, "verdict": verdict})
    for gain in (paired(row), speedup(row)):
        kind, most = judged(gain)
        assert kind == judgement[0] and judgement[1] in (None, most)


def test_a_number_whose_runs_have_a_spread_is_judged_by_it():
    rows = pd.DataFrame([{"variant": "a", "median_ms": 10.5, "p20_ms": 9.0, "p80_ms": 12.0, "n": 10}])
    verdict = pick(rows, "median_ms", "ms", variant="a").at_least(10)
    assert verdict.outcome == "undecided" and verdict.number.low < 10 < verdict.number.high


@given(st.integers(0, 2**32), st.floats(0.02, 0.98))
@settings(max_examples=20, deadline=None)
def test_a_counted_shares_interval_holds_the_true_share(seed, share):
    counted = np.random.default_rng(seed).binomial(30, share, 200)
    held = [(number := share_of(int(right), 30)).low <= share <= number.high for right in counted]
    assert np.mean(held) > 0.85


def test_noise_is_marked_on_times_and_what_comes_of_them():
    row = {"median_ms": 2.0, "peak_gib": 1.0, "ratio": 0.5, "low": 0.4, "high": 0.6, "pairs": 9, "variant": "a"}
    rows = pd.DataFrame([row | {"noisy": "p80 is 1.5 times p20"}, row | {"noisy": None, "variant": "b"}])
    noisy, quiet = (pick(rows, "median_ms", "ms", variant=name) for name in "ab")
    assert (f"{noisy}", f"{quiet}", f"{over(noisy, quiet)}") == ("2.00 ms†", "2.00 ms", "1.00×† (unpaired)")
    assert f"{pick(rows, 'peak_gib', 'GiB', variant='a')}" == "1.00 GiB"
    assert [f"{speedup(line):brief}" for line in rows.to_dict("records")] == ["2.0×†", "2.0×"]


def test_an_effect_leaves_1_out_of_its_99_percent_interval_and_a_null_has_all_of_it_near_1():
    of = [judged(Number(1.2, TIMES, low, 1.44 / low, 4))[0] for low in (1.02, 1.12)]
    assert of == [UNDECIDED, EFFECT]
    kind, most = judged(Number(1.0, TIMES, 0.98, 1 / 0.98, 40))
    assert kind == NONE and 0.02 < most <= 0.05
    assert [judged(Number(value, TIMES))[0] for value in (1.2, 1.05)] == [EFFECT, UNDECIDED]
    gains = {"a": Number(1.0, TIMES, 0.98, 1 / 0.98, 40), "b": Number(1.0, TIMES, 0.9, 1 / 0.9, 40)}
    assert (of_class(gains, NONE), of_class(gains, UNDECIDED)) == ("a ≤ 2.7 %", "b ≤ 15 %")
