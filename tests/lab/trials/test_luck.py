"""What a start adds, from null trials: their spread, its interval, and which records are asked."""

import numpy as np
import pandas as pd
import pytest

from helpers.lab.estimate import LUCK, LUCK_RETURNED
from helpers.lab.trials import luck


@pytest.mark.parametrize(("true", "starts"), [(0.003, 2), (0.02, 4)])
def test_luck_is_the_spread_that_was_put_in_and_its_interval_holds_it(true, starts):
    generator = np.random.default_rng(0)
    drawn = [luck.of(generator.normal(0, true / starts**0.5, 12), np.full(12, starts)) for _ in range(400)]
    assert np.mean([each.value for each in drawn]) == pytest.approx(true, rel=0.05)
    assert 0.92 < np.mean([each.low < true < each.high for each in drawn]) < 0.98


def test_a_machine_is_asked_for_its_own_null_trials_then_for_its_classs(monkeypatch):
    rows = {"cpu-here": [0.01] * 6, "cpu-other": [0.04] * 6, "cpu-few": [0.5]}

    def read(name, chapter, table):
        logs = rows.get(name, [])
        return pd.DataFrame({"ratio": np.exp(logs), "starts": 1, "allocator": "kept"} if logs else {})

    monkeypatch.setattr(luck.store, "read", read)
    monkeypatch.setattr(luck.store, "devices", lambda *, cpu: list(rows) if cpu else [])
    for here, expected in (("CPU here", 0.01), ("CPU few", 0.01), ("CPU unknown", 0.01)):
        monkeypatch.setattr(luck, "device_name", lambda here=here: here)
        assert luck.luck(kept=True) == pytest.approx(expected)
    rows.pop("cpu-here")
    assert luck.luck(kept=True) == pytest.approx(0.04)
    assert luck.luck(kept=False) == LUCK_RETURNED
    rows.clear()
    assert luck.luck(kept=True) == LUCK
