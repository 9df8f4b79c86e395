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
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

from torch.optim import Optimizer

from ..lab.arguments import check_at_least, check_choice
from ..script.running import Stop, compiled, counted_steps, end_of_iteration, run_script
from . import record
from .counting import COUNTERS, Counts, counting

BLOCK = "guarded_block"


class Guard:
    """Compares what blocks and scripts do with what `file` says of them, or writes it there.

    `tell` gets lines about what is less, new, or written anew. `where` goes before the blocks' names. `comparison` is
    the last one.
    """

    _running = ""

    def __init__(self, file: Path, where: str = "", update: bool = False, tell: Callable[[str], None] = print) -> None:
        self.file, self.where, self.update, self.tell = file, where, update, tell
        self.comparison: record.Comparison | None = None

    @contextlib.contextmanager
    def __call__(
        self, name: str, *, steps: int = 3, warm_up: int = 2, allow: Mapping[str, float] = MappingProxyType({})
    ) -> Iterator[Counts]:
        """Guard the block. `allow` maps counters to the share by which they may grow: `{"host waits": 1}`."""
        check_at_least(1, steps=steps)
        check_at_least(0, warm_up=warm_up, **{f"allow[{counter!r}]": math.ceil(allow[counter]) for counter in allow})
        check_choice(COUNTERS, **{f"allow[{counter!r}]": counter for counter in allow})
        if Guard._running:
            raise RuntimeError(f"the block {name!r} is inside of {Guard._running!r}: only one of them can be guarded")
        counts, Guard._running = Counts(), name
        try:
            run = _block(sys._getframe(2), counts)
            for _ in range(warm_up):
                run()
            with counting(counts) as begin:
                run()
                for _ in range(steps):
                    begin()
                    run()
            yield counts
        finally:
            Guard._running = ""
        self.check(name, counts, allow)

    def check(self, name: str, counts: Counts, allow: Mapping[str, float]) -> None:
        """Raise `MoreWork` where a step does more than is written down; write it where nothing is."""
        __tracebackhide__ = True
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        name = f"{self.where}{name}" + (f", rank {os.environ['RANK']} of {ranks}" if ranks > 1 else "")
        old = record.read(self.file).get(record.key(), {}).get(name)
        more, less = ((), ()) if old is None else record.compare(old, counts, allow)
        self.comparison = record.Comparison(name, self.file, old is not None, more, less)
        if more and not self.update:
            raise record.MoreWork(str(self.comparison))
        for text in (*more, *less):
            self.tell(f"{name}: {text}")
        if old is None or self.update:
            record.write(self.file, name, record.entry(counts))
            self.tell(f"{name}: written to {self.file}" + (", which is to be committed" if old is None else ""))


def _block(frame: FrameType, counts: Counts) -> Callable[[], Any]:
    """The block of the with statement that a frame enters, as a function. `counts` is what its `as` names."""
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
    if isinstance(variable := block.items[-1].optional_vars, ast.Name):
        names[variable.id] = counts
    function = ast.parse(f"def {BLOCK}({', '.join(names)}): pass")
    vars(function.body[0])["body"] = block.body
    space: dict[str, Any] = {}
    try:
        exec(compile(function, file, "exec", dont_inherit=True), frame.f_globals, space)
    except SyntaxError as error:
        raise RuntimeError(f"a guarded block can't be run several times: {error.msg} in line {error.lineno}") from None
    return lambda: space[BLOCK](**names)


def _position(node: Any) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def guard_script(
    guard: Guard, script: str, arguments: Sequence[str] = (), *, module: bool = False, steps: int, warm_up: int
) -> Any:
    """Run a script until `steps` iterations are counted, and compare them; its sys.exit's code, if it ends before.

    An iteration ends when the step of an optimizer returns, as in `dlspeed profile`.
    """
    program, ends = script if module else compiled(script), end_of_iteration()
    counts, done, begin = Counts(), 0, lambda: None
    with contextlib.ExitStack() as instruments:

        def stepped(optimizer: Optimizer | None) -> None:
            nonlocal done, begin
            if optimizer is not None and not ends(optimizer) and done:  # the very first step ends one, too
                return
            done += 1
            if done == warm_up:
                begin = instruments.enter_context(counting(counts))
            elif done > warm_up + steps:
                instruments.close()
                raise Stop
            else:
                begin()

        with counted_steps(stepped):
            code = run_script(program, [script, *arguments])
    if done > warm_up + steps:
        guard.check(" ".join([Path(script).name, *arguments]), counts, {})
    elif not code:
        wanted = f"{warm_up + 1 + steps} are needed (--after, --steps)"
        raise record.CannotGuard(f"{script} ended after {done} iterations: {wanted}")
    return code or 0
