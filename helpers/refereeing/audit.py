"""One whole run of a script, observed from outside of it: what it prints is not believed.

Counted are the steps of its optimizers, the rows and elements that its modules got with and without gradients, and the
parameters that are trained. After each step its loss and how far its parameters have moved are noted, which a script
that only shows a loss doesn't do. A run costs some percent more than without. The report goes to a file without a name.
"""

import contextlib
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import boot
from ..lab.trials import trees
from ..script import hooks, sandbox
from ..script.run_facts import RunFacts
from ..script.running import QUIET, compiled, counted_steps, end_of_iteration, run_script
from .cases import Case, contents

PROGRAM = boot.program("refereeing.audit")
GRACE_S = 3.0  # for threads and processes to end after the script
# What a script may not replace: it shows its steps, its losses and the time they take.
GUARDED = [
    *(hooks.BACKWARD, hooks.STEP_MADE, *hooks.CLOCKS, *hooks.SEEDS),
    *(hooks.Point(time, name) for name in ("process_time", "sleep")),
    *(hooks.Point(Tensor, name) for name in ("backward", "item")),
    *(hooks.Point(nn.Module, name) for name in ("__call__", "_call_impl")),
    *(hooks.Point(functional, name) for name in ("cross_entropy", "mse_loss")),
    hooks.Point(torch.cuda, "synchronize"),
]


@dataclass
class Audit:
    """`rows` and `elements` are those of training, `eval_rows` those without gradients. `broke`: rules, by name."""

    steps: int = 0
    rows: int = 0
    elements: int = 0
    eval_rows: int = 0
    parameters: int = 0
    losses: list[float | None] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)  # of the evaluation, as printed
    files: dict[str, str] = field(default_factory=dict)  # a character for each byte
    broke: list[str] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""


class Work:
    """What the modules of a script get: of each module the sums, of which the largest is that of a step.

    So a module that holds others counts once, and micro-batches as much as the batch that they make.
    """

    def __init__(self) -> None:
        self.sums: dict[bool, dict[int, list[int]]] = {True: {}, False: {}}

    def see(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        tensor = next((each for each in inputs if isinstance(each, Tensor) and each.dim()), None)
        if tensor is not None:
            sums = self.sums[torch.is_grad_enabled()].setdefault(id(module), [0, 0])
            sums[0] += len(tensor)
            sums[1] += tensor.numel()

    def take(self) -> dict[str, int]:
        """The work since the last call."""
        with_gradient, without = (self.sums[enabled].values() for enabled in (True, False))
        most = [max((each[index] for each in with_gradient), default=0) for index in (0, 1)]
        seen = {"rows": most[0], "elements": most[1], "eval_rows": max((each[0] for each in without), default=0)}
        self.sums = {True: {}, False: {}}
        return seen


def audit(case: Case, script: Path, seed: int = 0) -> Audit:
    """Run a prepared script to its end in a process of its own."""
    before, result = contents(script.parent), Audit()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as report, tempfile.TemporaryFile() as words:
        order = {"command": [str(script), *case.arguments], "root": folder, "seed": seed, "report": report.fileno()}
        result.error = _run(order, script.parent, words, case.seconds, result)
        for file in (report, words):
            file.seek(0)
        for line in report.read().decode().splitlines():
            for name, value in json.loads(line).items():
                known = getattr(result, name)
                setattr(result, name, value if name == "parameters" else known + value)
        said = words.read().decode(errors="replace")
        if result.error.startswith("ended") and said.strip():
            result.error = said.strip().splitlines()[-1][:200]
        result.numbers = [float(number) for number in re.findall(case.evaluation, said)] if case.evaluation else []
        root = os.path.realpath(folder)
        home = Path(root + str(script.parent.resolve()))
        paths = [path for pattern in case.outputs for path in home.glob(pattern)]
        result.files = {str(path.relative_to(home)): path.read_bytes().decode("latin-1") for path in paths}
        copied = [name for name in before if (home / name).resolve().is_relative_to(root)]  # and written to
    result.broke += ["files of the case changed"] if copied or contents(script.parent) != before else []
    return result


def _run(order: dict[str, Any], folder: Path, words: IO[bytes], limit: float, result: Audit) -> str:
    """Let a process do what `main` is ordered, and end all that it started; why it failed, if it did."""
    began, mark = time.monotonic(), uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(order)],
        env=os.environ | QUIET | {trees.MARK: mark},
        cwd=folder,
        pass_fds=[order["report"]],
        stdin=subprocess.DEVNULL,
        stdout=words,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    tree = trees.Tree(mark, process.pid)
    try:
        process.wait(limit)
        result.seconds = time.monotonic() - began
        while tree.members() and time.monotonic() < began + result.seconds + GRACE_S:
            time.sleep(0.02)
        result.broke += ["work left in the background"] if tree.members() else []
    except subprocess.TimeoutExpired:
        return f"takes more than {limit:.0f} s"
    finally:
        tree.end()
        process.wait()
    return f"ended with code {process.returncode}" if process.returncode else ""


def main(order_text: str) -> None:
    order = SimpleNamespace(**json.loads(order_text))
    report = os.fdopen(order.report, "w", buffering=1)

    def tell(**line: Any) -> None:
        line.pop("facts", None)
        if line:
            report.write(json.dumps(line) + "\n")

    sandbox.enter(order.root, [os.getcwd()], order.seed)
    sandbox.begin_seeds()
    facts, work, ends_iteration = RunFacts(tell, sys.maxsize), Work(), end_of_iteration()
    facts.install()
    hook = nn.modules.module.register_module_forward_pre_hook(work.see)
    origins: dict[int, Tensor] = {}  # each parameter after the first step

    def stepped(optimizer: torch.optim.Optimizer | None) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]] if optimizer else []
        moved = sum(_moved(p, origins) for p in parameters)
        tell(moved=[moved], parameters=sum(map(Tensor.numel, origins.values())))
        if optimizer is None or ends_iteration(optimizer):
            tell(steps=1, **work.take())
            facts.iteration_ended()

    with counted_steps(stepped):
        before = [getattr(*point) for point in GUARDED]
        code = run_script(compiled(order.command[0]), order.command)
        after = [getattr(*point) for point in GUARDED]
    patched = [point.name for point, was, now in zip(GUARDED, before, after, strict=True) if now is not was]
    patched += [] if hook.id in nn.modules.module._global_forward_pre_hooks else ["hooks"]
    tell(steps=int(bool(origins)), **work.take())  # the first, whose beginning nothing showed
    facts.tell_losses()
    tell(broke=[f"patched: {', '.join(patched)}"] if patched else [])
    tell(broke=["a thread left running"] if _threads() else [])
    sys.exit(code)


def _moved(parameter: Tensor, origins: dict[int, Tensor]) -> float:
    now = parameter.detach()
    origin = origins.setdefault(id(parameter), now.clone())
    return (now - origin).double().square().sum().item() if origin.shape == now.shape else float("nan")


def _threads() -> list[threading.Thread]:
    """Python's threads that go on after the script, but for a progress bar's."""
    gc.collect()
    left = [each for each in threading.enumerate() if each is not threading.main_thread()]
    left = [each for each in left if type(each).__name__ not in ("TMonitor", "_DummyThread")]
    until = time.monotonic() + GRACE_S
    for each in left:
        with contextlib.suppress(RuntimeError):
            each.join(max(until - time.monotonic(), 0))
    return [each for each in left if each.is_alive() and not each.name.startswith(("QueueFeeder", "ThreadPool"))]
