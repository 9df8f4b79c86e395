"""The line of the user's code that has something done, in a forward pass, in its backward pass, or compiled."""

import functools
import linecache
import re
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from ..script.running import run_script
from ..script.stacks import is_installed, line_of

Place = tuple[str, int]  # a file and a line
Chain = tuple[Place, ...]  # the user's lines on the stack, the innermost last
USER, OUTSIDE, RECOMPUTED, ENGINE, ON_HOST, GENERATED = "user", "outside", "recomputed", "engine", "host", "generated"
# What a function of torch's says about what it calls. Optimizers and loaders read tensors that never are on a GPU.
_KINDS = (
    (r"/torch/utils/checkpoint\.py", ".*", RECOMPUTED),
    (r"/torch/autograd/graph\.py", "_engine_run_backward", ENGINE),
    (r"/torch/(optim|utils/data)/", ".*", ON_HOST),
    (r"/c[a-z2-7]{51}\.py$", ".*", GENERATED),
)
_OWN = tuple(str(Path(__file__).parents[1] / room) + "/" for room in ("guard", "script"))
_BLOCKS = _OWN[0] + "blocks.py"  # and `run_script` run the user's code
_RESUMED = re.compile(r"torch_dynamo_resume_in_.*_at_(\d+)")  # the rest of a function after a graph break
LONGEST = 80
MOST, ALL, ALIKE, NAMED = 0.8, 0.99, 1.01, 2  # shares; lines that are named


@functools.cache
def kind(code: CodeType) -> str:
    name = code.co_filename
    if not is_installed(name):
        outside = name == _BLOCKS or code is run_script.__code__
        return OUTSIDE if outside else "" if name.startswith(_OWN) else USER
    matching = (what for path, function, what in _KINDS if re.search(path, name) and re.match(function, code.co_name))
    return next(matching, "")


@functools.cache
def resumed_at(code: CodeType) -> Place | None:
    """The line of the graph break after which Dynamo's function goes on."""
    found = _RESUMED.fullmatch(code.co_name)
    return (code.co_filename, int(found[1])) if found else None


@functools.cache
def source(place: Place) -> str:
    """The file's name and the text of the line, which stay the same where lines move."""
    file, line = place
    text = " ".join(linecache.getline(file, line).split())
    return f"{Path(file).name}: {text if len(text) <= LONGEST else text[: LONGEST - 1] + '…'}" if file else ""


class Lines:
    """The user's lines that have something done; in a backward pass, those whose gradient it is after its own.

    What `torch.utils.checkpoint` computes again belongs to the line that calls it.
    """

    def __init__(self) -> None:
        linecache.checkcache()  # files may have been edited since the last block
        source.cache_clear()
        self._thread = threading.get_ident()
        self._forward: dict[int, tuple[Chain, Chain]] = {}  # by an operator's number in the autograd graph

    def of(self, frame: FrameType | None) -> Chain:
        return walk(frame)[0]

    def of_operator(self, frame: FrameType | None) -> tuple[Chain, bool]:
        """Of an operator that is called in this frame; and whether its tensors are the host's own."""
        chain, outside, inside, recomputed, on_host = walk(frame)
        node = torch._C._current_autograd_node()
        if node is None:
            # The node of an operator that needs a backward pass has been numbered just before.
            self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, (chain, outside))
        elif (recomputed or not inside) and node._sequence_nr() in self._forward:
            before = self._forward[node._sequence_nr()][recomputed]
            chain = outside + tuple(place for place in before if place not in outside)
        elif not chain:  # a thread of autograd's, while this one waits for it
            chain = self.of(sys._current_frames().get(self._thread))
        return chain, on_host


def walk(frame: FrameType | None) -> tuple[Chain, Chain, bool, bool, bool]:
    """The user's lines, and of them those outside of checkpoints and of a backward pass.

    Whether the innermost is inside of a backward pass, whether a checkpoint is among the callers, and whether a library
    whose tensors are the host's.
    """
    lines: list[Place] = []
    outside, inside, recomputed, on_host = 0, False, False, False
    while frame is not None and (what := kind(frame.f_code)) != OUTSIDE:
        if what == USER:
            lines.append((frame.f_code.co_filename, line_of(frame)))
        elif what in (RECOMPUTED, ENGINE):
            recomputed |= what == RECOMPUTED
            inside |= what == ENGINE and bool(lines)
            outside = len(lines)
        on_host |= what == ON_HOST
        frame = frame.f_back
    return tuple(lines[::-1]), tuple(lines[outside:][::-1]), inside, recomputed, on_host


def growth(chains: Mapping[Chain, float], before: Mapping[str, float], more: float) -> list[str]:
    """The lines that make a number larger by so much, when lines, each with all that it calls, had those numbers.

    Down from the outermost, the line that most of the growth is under, until it is a new one, or calls several that
    grew. Of these, new ones are named, or all where everything happens under the line.
    """
    now, everything = inclusive(chains), sum(chains.values())
    was, line, depth = _renamed(now, before), "", 0
    grown = {text: number - was.get(text, 0.0) for text, number in now.items()}
    while not line or line in was or now[line] >= ALL * everything:
        below = {source(chain[depth]) for chain in chains if len(chain) > depth}
        called = sorted((text for text in below if grown[text] > 0), key=lambda text: (-grown[text], text))
        new = [text for text in called if text not in was]
        if called and grown[called[0]] >= MOST * more:
            line, depth, more = called[0], depth + 1, grown[called[0]]
            chains = {c: number for c, number in chains.items() if len(c) >= depth and source(c[depth - 1]) == line}
        elif sum(grown[text] for text in new) >= MOST * more:
            return new[:NAMED]
        else:
            return [line] if line and (now[line] < ALL * everything or not called) else called[:NAMED]
    return [line]


def _renamed(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Before's numbers by the lines' present texts: one that is new may be one that did about as much and is gone."""
    was = {text: number for text, number in before.items() if text in now}
    gone = {text: number for text, number in before.items() if text not in now}
    for text in sorted(now.keys() - before.keys(), key=lambda text: (-now[text], text)):
        alike = [old for old in gone if now[text] / 2 <= gone[old] <= now[text] * ALIKE]
        if alike:
            was[text] = gone.pop(max(alike, key=gone.get))
    return was


def inclusive(chains: Mapping[Chain, float]) -> Counter[str]:
    """By the text of a line, the numbers of all chains that it is part of."""
    totals: Any = Counter()
    for chain, number in chains.items():
        for text in {source(place) for place in chain}:
            totals[text] += number
    return totals
