"""What a start adds, from null trials: their spread, its interval, and the constants that trials assume."""

import numpy as np
import pytest

from helpers.book import devices, read
from helpers.lab.trials import start_noise


@pytest.mark.parametrize(("true", "starts"), [(0.003, 2), (0.02, 4)])
def test_it_is_the_spread_that_was_put_in_and_its_interval_holds_it(true, starts):
    generator = np.random.default_rng(0)
    drawn = [
        start_noise.of_ratios(generator.normal(0, true / starts**0.5, 12), np.full(12, starts)) for _ in range(400)
    ]
    assert np.mean([each.value for each in drawn]) == pytest.approx(true, rel=0.05)
    assert 0.92 < np.mean([each.low < true < each.high for each in drawn]) < 0.98


@pytest.mark.parametrize(("kept", "constant"), [(True, start_noise.KEPT), (False, start_noise.RETURNED)])
def test_the_recorded_null_trials_say_what_trials_assume(kept, constant):
    tables = [read(name, "tool", "nulls") for name in devices(cpu=True)]
    recorded = [noise for table in tables if (noise := start_noise.of_null_trials(table, kept))]
    assert recorded
    assert all(noise.low < constant < noise.high for noise in recorded)
