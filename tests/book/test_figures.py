import errno
from unittest.mock import Mock

import matplotlib
import pytest

from helpers.book import figures
from helpers.book.values import Number
from helpers.lab import files


def draw():
    figure, axes = figures.new(1, 2)
    with figures.style():
        for axis in axes:
            axis.plot([1, 2, 3], [1000, 4000, 9000], label="squares")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center")
    return figure


def test_the_same_drawing_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("HELPERS_FIGURES", str(tmp_path))
    one, other = draw(), draw()
    first = figures.save(one, "squares").read_bytes()
    assert figures.save(other, "squares").read_bytes() == first
    assert first.startswith(b"<?xml") and b"<dc:date>" not in first
    assert figures.svg(other, "another name").encode() != first  # the ids of two figures differ
    picture = figures.png(one)
    assert figures.png(one) == figures.png(other) == picture
    assert picture.startswith(b"\x89PNG") and len(picture) < 30_000 and b"tEXt" not in picture


def test_the_style_stays_inside():
    before = dict(matplotlib.rcParams)
    draw()
    assert dict(matplotlib.rcParams) == before


def test_the_last_bits_of_a_layout_do_not_show():
    """As another processor's arithmetic might give them."""
    pictures = []
    for nudge in (0.0, 1e-9):
        figure, axis = figures.new(height=2)
        axis.plot([0, 1 + nudge], [0, 2 + nudge], "o-", clip_on=True)
        axis.set_position([0.1 + nudge, 0.1, 0.8, 0.8])
        pictures.append(figures.svg(figure, "nudged"))
    assert pictures[0] == pictures[1]
    assert "clip-path" in pictures[0]


def test_a_forest_tells_the_three_classes_by_marker_and_colour():
    numbers = {
        "sure": Number(2.0, "×", 1.8, 2.2, 9),
        "unsure": Number(1.1, "×", 0.9, 1.3, 9),
        "none": Number(1.0, "×", 0.99, 1.01, 90),
        "apart": Number(1.5, "×"),
    }
    _, axis = figures.forest(numbers)
    points = [line for line in axis.lines if line.get_marker() in ("o", "x")]
    colours = [figures.BLUE, figures.GREY, figures.GREY, figures.BLUE]
    assert [point.get_color() for point in points] == colours
    markers = [("o", "full"), ("x", "none"), ("o", "none"), ("o", "full")]
    assert [(point.get_marker(), point.get_fillstyle()) for point in points] == markers
    assert [label.get_text() for label in axis.get_yticklabels()] == list(numbers)


def test_where_figures_cannot_be_written_they_are_only_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("HELPERS_FIGURES", str(tmp_path))
    monkeypatch.setattr(files, "write", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
    figures.save(figures.new()[0], "shown")
    monkeypatch.setattr(files, "write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        figures.save(figures.new()[0], "shown")
