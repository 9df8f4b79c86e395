"""The product rate is measured for seconds, and only some tests are about it."""

import pytest


@pytest.fixture(autouse=True)
def a_known_product_rate(monkeypatch):
    monkeypatch.setattr("helpers.rush.rates.matmul_rate", lambda precision: ("BLAS", 1e12))
