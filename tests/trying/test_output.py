"""A script without its output: what only shows something goes, with what was computed for that; what trains stays."""

import ast

import pytest

from helpers.trying.probes import without_output

KEPT = "optimizer.step()"
DRAWN = """
import matplotlib.pyplot as plt
from torchvision.utils import save_image
import logging
log = logging.getLogger(__name__)
def plot(values):
    "Of each step."
    fig, ax = plt.subplots()
    ax.plot(values)
    fig.savefig("a.png")
history = []
for i in range(9):
    optimizer.step()
    history.append(loss.item())
    if i % 2 == 0:
        with torch.no_grad():
            fake = net(noise)
        grid = make_grid(fake)
        plt.imshow(grid)
        save_image(fake, "b.png")
        log.info("%d %s", i, loss.item())
    plot(history)
"""


def left(source: str) -> str:
    return ast.unparse(without_output(source))


def test_a_figures_data_and_the_networks_pass_for_it_go_with_the_figure():
    code = left(DRAWN)
    assert all(name not in code for name in ("savefig", "net(", "make_grid", "append", "info", "if i", "plot(history)"))
    assert f"for i in range(9):\n    {KEPT}" in code


@pytest.mark.parametrize(
    "source",
    [
        "loss = train_one_epoch(model)\nprint(loss)",  # trains
        "def work():\n    loss.backward()\n    return loss\nvalue = work()\nprint(value)",
        "batch = next(batches)\nprint(batch.shape)",
        "seen.total = 1\nprint(seen.total)",  # somebody else may read it
        "unread = model(x)",  # nothing read it before
    ],
)
def test_what_may_train_stays(source):
    assert left(source) == source.rpartition("\nprint")[0] or left(source) == source


def test_lines_keep_their_numbers():
    tree = without_output("print(1)\n\nif x:\n    print(2)\nelse:\n    y = 3\n")
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assign)] == [6]
