"""The product rate is measured for seconds, and only some tests are about it."""

import pytest

from helpers.lab.ceilings import ProductRate
from helpers.lab.timing import Timing

RATE = ProductRate("BLAS", 1.0, Timing(1.0, 1.0, 1.0, 1))


@pytest.fixture(autouse=True)
def a_known_product_rate(monkeypatch):
    monkeypatch.setattr("helpers.rush.rates.product_rate", lambda _: RATE)
