"""What is guarded: a test's block, which runs a few times, or the iterations of a script.

    with Guard(Path("speed_guard.json"))("train step", steps=3):
        step()

The block runs `warm_up` times as it is, once to learn what memory it finds, `steps` times counted, and once more as
Python runs it, whose names are those that stay. `steps` of its runs are compared with what is written down.
"""

import ast
import contextlib
import itertools
import linecache
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from ..lab.arguments import check_at_least, check_choice
from ..watching.run_script import Stop, compiled, run_script
from ..watching.watch import counted_steps
from ..watching.windows import end_of_iteration
from . import record
from .counting import COUNTERS, Counts, counting

STEPS, WARM_UP = 3, 2
BLOCK = "guarded_block"


class Guard:
    """Compares what blocks and scripts do with what `file` says of them, or writes it there.

    `tell` gets lines about what is less, new, or written anew. `where` goes before the blocks' names.
    """

    _running = False

    def __init__(
        self, file: Path, where: str = "", *, update: bool = False, tell: Callable[[str], None] = print
    ) -> None:
        self.file, self.where, self.update, self.tell = file, where, update, tell

    def __call__(
        self, name: str, *, steps: int = STEPS, warm_up: int = WARM_UP, allow: Mapping[str, float] | None = None
    ) -> "Block":
        """A block to guard. `allow` maps counters to the share by which they may grow: `{"host waits": 1}`."""
        check_at_least(1, steps=steps)
        check_at_least(0, warm_up=warm_up)
        for counter, share in (allow or {}).items():
            check_choice(COUNTERS, allow=counter)
            if not share >= 0:
                raise ValueError(f"allow[{counter!r}] is {share!r}; it must be a share of at least 0")
        return Block(self, name, steps, warm_up, allow or {})

    def check(self, name: str, counts: Counts, allow: Mapping[str, float]) -> None:
        """Raise `MoreWork` where a step does more than is written down; write it where nothing is."""
        __tracebackhide__ = True
        name = f"{self.where}{name}{_rank()}"
        old = record.read(self.file).get(record.key(), {}).get(name)
        more, less = ([], []) if old is None else record.compare(old, counts, allow)
        if more and not self.update:
            raise record.MoreWork("\n  ".join([f"{name} has more to do than {self.file.name} says", *more]))
        for text in (*more, *less):
            self.tell(f"{name}: {text}")
        if old is None or self.update:
            record.write(self.file, name, record.entry(counts))
            self.tell(f"{name}: written to {self.file}" + (", which is to be committed" if old is None else ""))
        elif less:
            self.tell(f"{name}: less to do than {self.file.name} says; --speed-guard-update writes it down")


class Block:
    """A with statement's block, run as often as it takes."""

    def __init__(self, guard: Guard, name: str, steps: int, warm_up: int, allow: Mapping[str, float]) -> None:
        self._guard, self._name, self._steps, self._warm_up, self._allow = guard, name, steps, warm_up, allow

    def __enter__(self) -> Counts:
        __tracebackhide__ = True
        if Guard._running:
            raise RuntimeError(f"{self._name!r} begins inside of another guarded block: only one can count")
        Guard._running = True
        try:
            self._counts = self._count(sys._getframe(1))
        except BaseException:
            Guard._running = False
            raise
        return Counts()  # of the last run, which isn't counted

    def _count(self, frame: FrameType) -> Counts:
        __tracebackhide__ = True
        counts: list[Counts] = [Counts()]
        run = _block(frame, lambda: counts[-1])
        for _ in range(self._warm_up):
            run()
        with counting() as (counted, begin):
            counts.append(counted)
            run()
            for _ in range(self._steps):
                begin()
                run()
        return counted

    def __exit__(self, kind: Any, *_error: Any) -> None:
        __tracebackhide__ = True
        Guard._running = False
        if kind is None:
            self._guard.check(self._name, self._counts, self._allow)


def _block(frame: FrameType, counts: Callable[[], Counts]) -> Callable[[], Any]:
    """The block of the with statement that a frame enters, as a function. `counts()` is what its `as` names."""
    file, instruction = frame.f_code.co_filename, frame.f_lasti // 2
    position = next(itertools.islice(frame.f_code.co_positions(), instruction, None))
    tree = ast.parse("".join(linecache.getlines(file)))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.With)]
    # The position of the statement, and from Python 3.13 on that of the expression that makes the guard.
    block = next((w for w in statements if position in map(_position, (w, w.items[-1].context_expr))), None)
    if block is None:
        raise RuntimeError("a guarded block is run several times: begin it by a with statement in a file")
    if any(isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)) for node in ast.walk(block)):
        raise RuntimeError("a guarded block can't yield or await: call a function there that runs the step")
    names = {name: value for name, value in frame.f_locals.items() if name.isidentifier()}
    given = {variable.id} if isinstance(variable := block.items[-1].optional_vars, ast.Name) else set()
    function = ast.parse(f"def {BLOCK}({', '.join(names.keys() | given)}): pass")
    vars(function.body[0])["body"] = block.body
    space: dict[str, Any] = {}
    try:
        exec(compile(function, file, "exec", dont_inherit=True), frame.f_globals, space)
    except SyntaxError as error:
        raise RuntimeError(f"a guarded block can't be run several times: {error.msg} in line {error.lineno}") from None
    return lambda: space[BLOCK](**names | {name: counts() for name in given})


def _position(node: Any) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


class TooShort(Exception):
    """A script ended before enough iterations were counted."""


def guard_script(
    guard: Guard,
    script: str,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    steps: int = STEPS,
    warm_up: int = WARM_UP,
) -> Any:
    """Run a script until `steps` iterations are counted, and compare them; its sys.exit's code, if it ends before.

    An iteration ends when the step of an optimizer returns, as in `dlspeed profile`.
    """
    program, ends = script if module else compiled(script), end_of_iteration()
    done, counted = 0, Counts()
    begin: Callable[[], None]
    with contextlib.ExitStack() as instruments:

        def stepped(optimizer: Optimizer | None) -> None:
            nonlocal done, counted, begin
            if optimizer is not None and not ends(optimizer):
                return
            done += 1
            if done == warm_up:
                counted, begin = instruments.enter_context(counting())
            elif done == warm_up + 1 + steps:
                instruments.close()
                raise Stop
            elif done > warm_up:
                begin()

        with counted_steps(stepped):
            code = run_script(program, [script, *arguments])
    if done <= warm_up + steps:
        if code:
            return code
        raise TooShort(f"{script} ended after {done} iterations: {warm_up + 1 + steps} are needed (--after, --steps)")
    guard.check(" ".join([Path(script).name, *arguments]), counted, {})
    return 0


def _rank() -> str:
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    return f", rank {os.environ.get('RANK', 0)} of {ranks}" if ranks > 1 else ""
