import matplotlib
import pytest

from helpers.lab import figures


def draw():
    figure, axes = figures.new(1, 2)
    with figures.style():
        for axis in axes:
            axis.plot([1, 2, 3], [1000, 4000, 9000], label="squares")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center")
    return figure


def test_the_same_drawing_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("HELPERS_FIGURES", str(tmp_path))
    first = figures.save(draw(), "squares").read_bytes()
    assert figures.save(draw(), "squares").read_bytes() == first
    assert first.startswith(b"<?xml")
    assert b"<dc:date>" not in first


def test_one_figure_saved_twice_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("HELPERS_FIGURES", str(tmp_path))
    figure = draw()
    first = figures.svg(figure, "squares")
    assert figures.svg(figure, "squares") == first
    assert figures.save(figure, "squares").read_text() == first


def test_the_style_stays_inside():
    before = dict(matplotlib.rcParams)
    draw()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", ["a", "b"])
def test_ids_differ_between_figures(name):
    other = "b" if name == "a" else "a"
    assert figures.svg(draw(), name) != figures.svg(draw(), other)
