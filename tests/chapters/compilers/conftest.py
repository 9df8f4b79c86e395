import pytest

from helpers.chapters.compilers import side_by_side


@pytest.fixture(autouse=True)
def _few_rounds_without_rests(monkeypatch):
    monkeypatch.setattr(side_by_side, "REST_S", 0.0)
    monkeypatch.setattr(side_by_side, "LEAST_ROUNDS", 8)
