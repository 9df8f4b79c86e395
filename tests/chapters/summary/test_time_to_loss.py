"""Both sides of the race start from one model, see one text, and are judged by one function."""

import numpy as np
import pandas as pd
import pytest
import torch

from helpers.book import store
from helpers.book.runner import measure
from helpers.chapters.summary import time_to_loss as table
from helpers.chapters.summary.time_to_loss import (
    BEGINNER,
    CHOICE,
    CHOOSING,
    COMPILED,
    EVERYTHING,
    LONGEST,
    PADDING,
    SIDES,
    SIZES,
    TRAINING,
    Judge,
    begin,
    chosen_rate,
    padded_lines,
    train,
    without_padding,
)
from helpers.kernels.chunked_loss import IGNORED
from helpers.text.articles import Articles

SMALL = SIZES["small"]
HEADINGS = "".join(f" = Article {number} = \n\n = = History = = \n Text {number} .\n" for number in range(20))


@pytest.fixture(autouse=True)
def _generated_text(monkeypatch):
    monkeypatch.delenv("HELPERS_WIKITEXT", raising=False)


@pytest.fixture(scope="module")
def text():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HELPERS_WIKITEXT", raising=False)
        return Articles.local()


def test_the_last_tenth_of_the_articles_is_held_out(tmp_path, monkeypatch):
    for name in ("valid", "test"):
        (tmp_path / f"wiki.{name}.tokens").write_text(HEADINGS)
    monkeypatch.setenv("HELPERS_WIKITEXT", str(tmp_path))
    articles = Articles.local()
    lines = [bytes(line).decode() for line in articles.held_out]
    assert lines[:3] == ["\n= Article 16 =\n", "\n= = History = =\n", "\nText 16 .\n"]
    assert len(lines) == 4 * 3 and len(articles.trained) == 36 * 3
    assert "validation split" in articles.source and "test split" in articles.source


def test_both_sides_start_from_the_same_weights(text):
    models = [begin(side, TRAINING, 0, 1e-3, SMALL, text)[0] for side in SIDES]
    weights = [model.weights() for model in models]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.long
def test_a_rate_is_chosen_by_fast_steps_that_learn_what_the_beginners_do(text):
    losses = []
    for part in (CHOICE, TRAINING):
        model, steps = begin(BEGINNER, part, 0, 1e-3, SMALL, text)
        seen = [next(steps) for _ in range(3)]
        losses.append((seen, Judge(text.held_out, SMALL)(model)))
    (fast_seen, fast), (slow_seen, slow) = losses
    assert fast_seen == slow_seen
    assert fast == pytest.approx(slow, rel=0.01)


def test_padding_is_no_target(text):
    tokens = next(padded_lines(text, SMALL, 0))
    assert tokens.shape == (SMALL.lines, LONGEST + 1) and (tokens[:, -1] == PADDING).any()
    _, targets, real = next(without_padding(iter([tokens])))
    assert real == int((tokens[:, 1:] != PADDING).sum()) == int((targets != IGNORED).sum())


def test_every_held_out_byte_counts_once_however_long_its_line():
    rng = np.random.default_rng(0)
    lines = [rng.integers(32, 127, size).astype(np.uint8) for size in (5, LONGEST + 1, 2 * LONGEST + 9)]
    judge = Judge(lines, SMALL)
    assert sum(int((batch[:, 1:] != PADDING).sum()) for batch in judge.batches) == sum(map(len, lines)) - len(lines)


@pytest.mark.parametrize("side", SIDES)
def test_a_training_ends_at_the_first_evaluation_at_the_target(side):
    row = train(side, TRAINING, 0, 8e-3, SMALL)
    curve = [tuple(map(float, point.split(":"))) for point in row["curve"].split(";")]
    assert row["reached"] and curve[-1][1] <= SMALL.target < min([loss for _, loss in curve[:-1]], default=9)
    assert row["training_s"] == pytest.approx(curve[-1][0], rel=1e-3)
    assert row["steps"] == len(curve) * SMALL.every
    assert row["source"].startswith("synthetic")


def recorded(side: str, part: str, seed: int, seconds: float, reached: bool = True, **others) -> dict:
    row = {"side": side, "part": part, "seed": seed, "training_s": seconds, "reached": str(reached), "target": 2.1}
    row |= {
        "learning_rate": 2e-3,
        "held_out_loss": 2.0,
        "steps": 100,
        "step_ms": 50.0,
        "bytes_per_s": 1.0,
        "million_parameters": 1.0,
    }
    return row | {"peak_gib": 1.0, "start_s": 2.0, "curve": f"{seconds / 2}:2.5;{seconds}:2.0"} | others


def rows(slow_reached: bool = True) -> pd.DataFrame:
    trainings = [recorded(BEGINNER, TRAINING, seed, 100.0 + seed, slow_reached) for seed in range(3)]
    trainings += [recorded(EVERYTHING, TRAINING, seed, seconds) for seed, seconds in enumerate((9.9, 10.1, 10.3))]
    trainings += [recorded(EVERYTHING, CHOICE, CHOOSING, 9.0)]
    return pd.DataFrame([*trainings, recorded(EVERYTHING, COMPILED, CHOOSING, 40.0, step_ms=40.0, start_s=32.0)])


def test_the_ratio_is_of_times_seed_by_seed():
    numbers = table.of_rows(rows())
    assert numbers.ratio.n == 3
    assert numbers.ratio.value == pytest.approx(10, rel=0.01) and numbers.ratio.low < 10 < numbers.ratio.high
    assert numbers.table["reached"].tolist() == ["3 of 3", "3 of 3", "1 of 1"]
    assert numbers.curves.query("side == 'beginner' and seed == 0")["loss"].tolist() == [2.5, 2.0]


def test_rates_beside_the_sides_are_told_and_compilation_is_what_the_start_took_longer():
    numbers = table.of_rows(rows().assign(product_tflops=[0.1] * 3 + [0.2] * 5))
    assert numbers.fuller.value == pytest.approx(0.1) and numbers.longer.value == pytest.approx(0.1)
    assert numbers.machine.value == 2 and numbers.compile.value == pytest.approx(30)


def test_a_beginner_that_was_stopped_makes_the_ratio_a_lower_bound():
    numbers = table.of_rows(rows(slow_reached=False))
    assert numbers.ratio.low is None
    assert "at least" in numbers.ratio.derivation


def test_the_rate_is_the_one_that_reaches_the_target_first_or_comes_nearest():
    def tried(rate: float, reached: bool, steps: int, loss: float) -> dict:
        return {"learning_rate": rate, "reached": reached, "steps": steps, "held_out_loss": loss}

    far, near = tried(1e-3, False, 9, 2.5), tried(2e-3, False, 9, 2.3)
    slow, fast = tried(4e-3, True, 8, 2.09), tried(8e-3, True, 6, 2.1)
    assert chosen_rate([far, near]) == 2e-3
    assert chosen_rate([far, near, slow, fast]) == 8e-3


@pytest.mark.long
def test_a_training_keeps_its_own_seconds_in_its_record(tmp_path):
    measure([table], "small", results=tmp_path)
    (file,) = tmp_path.rglob("time_to_loss.csv")
    for row in store.read_rows(file):
        last = row["curve"].split(";")[-1].split(":")[0]
        assert float(row["training_s"]) == pytest.approx(float(last), rel=1e-3)
        assert float(row["seconds"]) > float(row["training_s"])  # of all trainings
