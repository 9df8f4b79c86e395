import matplotlib
import pytest

from helpers.lab import figures


def draw():
    figure, axis = figures.new()
    with figures.style():
        axis.plot([1, 2, 3], [1, 4, 9], label="squares")
        axis.legend()
    return figure


def test_the_same_drawing_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("HELPERS_FIGURES", str(tmp_path))
    first = figures.save(draw(), "squares").read_bytes()
    assert figures.save(draw(), "squares").read_bytes() == first
    assert first.startswith(b"<?xml")
    assert b"<dc:date>" not in first


def test_the_style_stays_inside():
    before = dict(matplotlib.rcParams)
    draw()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", ["a", "b"])
def test_ids_differ_between_figures(name):
    other = "b" if name == "a" else "a"
    assert figures.svg(draw(), name) != figures.svg(draw(), other)
