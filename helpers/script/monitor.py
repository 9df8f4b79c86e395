"""What a training does while nothing slows it: where its wall time goes, line by line, and what no operator shows.

A thread looks at the stack of the thread that trains, a hundred times a second at first and then less often, and
charges the time since its last look to the innermost line of the user's code, and to what a library does for it there:
waiting for the loader, saving, drawing. A library's own time goes to the line that called it. Counted are iterations'
times, memory, padding, garbage collections, compilations, lists that grow, loaders that begin, the script's own clock,
and switches that it sets. A call of what is wrapped for that (embeddings, `torch.no_grad`) takes 1 µs more.
"""

import contextlib
import gc
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ..lab.memory import AVAILABLE, RESIDENT, system_bytes
from . import hooks
from .calls import Calls
from .clock import Clock, State
from .cores import Cores, CoreWait
from .iterations import BEGAN, EVALUATED, RECORDED, Iterations, Pace, innermost, wall_time
from .observation import LineTime, Observation
from .settings import Settings, variables
from .stacks import (
    DATASET,
    EVALUATING,
    OURS,
    SWITCH_S,
    Line,
    Stack,
    functions_around,
    has_ended,
    is_library,
    looks,
    read_stack,
    user_line,
)
from .tensors import Growing, batch_makers, dependencies, padded_at, padded_positions

MEASURED_S = 0.2  # between two looks at memory at least, and a hundredth of the time so far
BATCHES, LOOKS = 8, 32  # whose padding is counted; inputs of embeddings that are looked at, each a wait on a GPU
KEPT, LOOKS_KEPT, DEAREST, LOOPS = 5000, 200_000, 200, 20  # iterations' seconds, half an hour's looks, lines, loops
AROUND = (OURS, contextlib.__file__)  # the files of what is around a script


class Monitor:
    """Told of each iteration's end by the thread that trains, which it looks at between `start` and `stop`."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = pace  # of minutes, if they are watched
        self.counts = Observation()  # what is counted on the way
        self.seconds: Any = Counter()  # (activity, stack) -> charged
        self.looked: deque[tuple[float, tuple[str, Stack], float]] = deque(maxlen=LOOKS_KEPT)  # when, what, charged
        self.iterations = Iterations()
        self.observed_s = 0.0  # of all iterations
        self.padding: list[tuple[int, int, int]] = []  # of each batch
        self.looks = 0  # for padding
        self.calls, self.cores = Calls(), Cores()
        self.away = 1  # until it starts, and as often as `looking_away` is entered
        self.count = 0
        self.settings, self.clock = Settings(), Clock(self.state)
        self.growing = Growing()
        self.graphs: list[list[list[int]]] | None = None  # of backward passes, where they are wanted
        self.loaders: Counter[Line] = Counter()  # that began while a graph is recorded, by the line that began them
        self.makers: list[CodeType] = []  # functions that make a batch
        self.collected: Any = Counter()  # seconds of garbage collections, by the line that began them
        self._all = 0  # iterations that have ended, those too in which it looked away
        self._last = 0.0  # when the iteration began
        self._measured = 0.0  # when memory is to be looked at again
        self._turned = self._away_s = 0.0  # when it last turned away or back, and the seconds away until then
        self._seen_s = 0.0  # when a look last found the script's code
        self._evaluating = False
        self._rare = (0, 0)  # evaluations and epochs until the last iteration
        self._no_grad = self._epoch_ends = 0  # the iteration after which the loader's pass ends
        self._collecting = self._collected = 0.0  # when it began, and the seconds until the last iteration ended
        self._thread = self._native = 0
        self._training: set[CodeType] = set()  # the functions around the steps of an optimizer
        self._core = CoreWait()
        self._ended = threading.Event()
        self._looking: threading.Thread | None = None

    def start(self) -> None:
        """Look at this thread from now on."""
        self._thread, self._native = threading.get_ident(), threading.get_native_id()
        self._training = {*functions_around(sys._getframe())}
        self._core.begin(self._native)
        self._last = self._turned = time.perf_counter()
        self.away = 0
        self._looking = threading.Thread(target=self._look, name="monitor", daemon=True)
        self._looking.start()

    def stop(self) -> None:
        """What the script did since the last iteration counts, too, unless that is part of an ordinary one."""
        looking = self._looking and not self.away and not self._ended.is_set()
        if looking and self._seen_s - self._last > self.iterations.slow_from():
            self._add(self._seen_s)
        self._ended.set()
        if self._looking is not None:
            self._looking.join(1.0)

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """Charge what is done in here to nothing: what is ours, or slowed by us."""
        self._turn(1)
        try:
            yield
        finally:
            self._turn(-1)

    def _turn(self, by: int) -> None:
        self._away_s = self._away_until(now := time.perf_counter())
        self._turned = self._last = now
        self._core.passed()
        self.away += by

    def _away_until(self, now: float) -> float:
        """Seconds looked away until now, those too that no look fell into."""
        return self._away_s + (now - self._turned if self.away else 0.0)

    def state(self) -> State:
        """For a clock of the script's."""
        away_s = self._away_until(time.perf_counter()) if self._looking else 0.0
        used = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
        pending = used and not torch.cuda.current_stream().query()
        return State(self._all, self.count, away_s, self.counts.evaluations, pending)

    def iteration_ended(self) -> None:
        self._all += 1
        self.growing.iteration_ended()
        if self._looking is None:
            self.start()
            return
        self._evaluating = False
        now, last = time.perf_counter(), self._last
        self._add(now)
        took, self._last = now - last, now
        if self.away:
            return
        self.count += 1
        self.observed_s += took
        if now >= self._measured:  # the memory, 50 to 200 µs
            self._measured = now + max(MEASURED_S, self.observed_s / 100)
            on_device = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
            self.counts.memory.append((self.count, system_bytes(RESIDENT), on_device))
        if self.pace and self.pace.is_due(self.count):
            with self.looking_away():
                self.pace.look(self.count, self.seconds)

    def _add(self, now: float) -> None:
        """What has passed since the last iteration, as one more."""
        rare, before = (self.counts.evaluations, self.counts.epochs), self._rare
        marks = EVALUATED * (rare[0] > before[0]) | BEGAN * (rare[1] > before[1]) | RECORDED * bool(self.away)
        self.iterations.add(now, now - self._last, marks, self.counts.garbage_s - self._collected, self._core.passed())
        self._rare, self._collected = rare, self.counts.garbage_s

    def epoch_left_s(self) -> float:
        """How long the loader's pass takes from now on; 0 if nobody knows, or one has ended already."""
        left = self._epoch_ends - self._all if not self.counts.epochs else 0
        return max(left, 0) * self.observed_s / max(self.count, 1)

    def _look(self) -> None:
        away = 0.0
        for began, now, calling in looks(self._thread, self._ended):
            before, away = away, self._away_until(now)
            if not self.away:
                activity, stack = read_stack(calling, self._training, not (self._no_grad or self._evaluating))
                activity = EVALUATING if self._evaluating and self._no_grad else activity
                if has_ended(calling) or stack[0][0].co_filename.startswith(AROUND):
                    continue
                self._seen_s = now
                taken = max(now - began - (away - before), 0.0)
                self.seconds[activity, stack] += taken
                self.looked.append(((began + now) / 2, (activity, stack), taken))
            self.cores.look(now, away, self._native)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See evaluations, epochs, padding and garbage collections, the script's clock and its settings."""
        arounds: dict[hooks.Point, Callable[..., Any]] = {
            hooks.TRAIN_MODE: self._train_mode,
            hooks.LOADER_BEGUN: self._loader_begun,
            hooks.EMBEDDING: self._embedding,
            hooks.BACKWARD: self._backward,
            hooks.REPLICA: self._replica,
            **dict.fromkeys(hooks.GRADIENTS_OFF, self._gradients_off),
            **dict.fromkeys(hooks.GRADIENTS_BACK, self._gradients_back),
        }
        with hooks.wrap(arounds | self.settings.arounds() | self.clock.arounds()) as undo:
            gc.callbacks.append(self._collection)
            undo.callback(gc.callbacks.remove, self._collection)
            undo.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
            undo.callback(self.stop)
            yield

    def _train_mode(self, train: Callable[..., nn.Module], module: nn.Module, mode: bool = True) -> nn.Module:
        if self.count and threading.get_ident() == self._thread:
            self.counts.evaluations += not mode and not self._evaluating
            self._evaluating = not mode
        return train(module, mode)

    def _loader_begun(self, iterate: Callable[[DataLoader], Any], loader: DataLoader) -> Any:
        if torch.is_grad_enabled():
            self.makers = batch_makers(loader)
            with contextlib.suppress(TypeError):  # of an iterable dataset nobody knows it
                self._epoch_ends = self._all + len(loader)
        if self._all and torch.is_grad_enabled():
            self.counts.epochs += bool(self.count)
            self.loaders[user_line(sys._getframe(1))] += 1
        return iterate(loader)

    def _embedding(self, embed: Callable[..., Tensor], module: nn.Embedding, input: Tensor) -> Tensor:
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        plain = not (torch.compiler.is_compiling() or capturing) and self.count and not self.away
        if plain and not torch.autograd._profiler_enabled() and len(self.padding) < BATCHES and self.looks < LOOKS:
            self.looks += 1
            self.padding += filter(None, [padded_positions(input)])
        return embed(module, input)

    def _backward(self, backward: Callable[..., None], *arguments: Any, **options: Any) -> None:
        if self.graphs is not None and threading.get_ident() == self._thread:
            self.graphs.append(dependencies(options.get("tensors", *arguments[:1])))
        if not self.away:
            self.counts.anomaly |= torch.is_anomaly_enabled()
            self.counts.backwards += 1
            self.counts.retained += bool(options.get("retain_graph", len(arguments) > 2 and arguments[2]))
        backward(*arguments, **options)

    def _replica(
        self, forward: Callable[..., Any], module: DistributedDataParallel, *arguments: Any, **options: Any
    ) -> Any:
        if not torch.compiler.is_compiling() and not self.away and torch.is_grad_enabled():
            self.counts.averaged += module.require_backward_grad_sync
            self.counts.searched |= module.find_unused_parameters
        return forward(module, *arguments, **options)

    def _gradients_off(self, enter: Callable[..., Any], mode: Any) -> Any:
        self._no_grad += 1
        return enter(mode)

    def _gradients_back(self, leave: Callable[..., Any], mode: Any, *error: Any) -> Any:
        self._no_grad -= 1
        return leave(mode, *error)

    def _collection(self, phase: str, _about: dict) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        elif not self.away:  # in whatever thread, as all stand still
            seconds = time.perf_counter() - self._collecting
            self.counts.garbage_s += seconds
            self.collected[user_line(sys._getframe(1))] += seconds

    def observation(self, workers: set[int] = frozenset()) -> Observation:  # type: ignore[assignment]
        """What was seen until now; `workers` are a loader's, by their processes' numbers."""
        by_line: Any = Counter()
        for (activity, stack), seconds in dict(self.seconds).items():
            by_line[(*stack[0], activity)] += seconds
        lines = [
            LineTime(code.co_filename, line, code.co_name, activity, seconds, self.calls.made(code))
            for (code, line, activity), seconds in by_line.most_common(DEAREST)
        ]
        took = [s for s, marks in zip(self.iterations.took, self.iterations.marks, strict=True) if not marks & RECORDED]
        return replace(
            self.counts,
            seconds=sum(self.seconds.values()),
            iterations=took[-KEPT:],
            count=len(took),
            lines=lines,
            wall=self._wall(),
            loops=self.calls.loops(dict(self.seconds))[:LOOPS],
            cores=self.cores.data(workers),
            device_bytes=torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_initialized() else 0,
            padding=[sum(counts) for counts in zip(*self.padding, strict=True)],
            padded_at=padded_at(self.makers, [line.file for line in lines]) if self.padding else None,
            collected=[(*line, seconds) for line, seconds in self.collected.most_common(1)],
            loads=innermost(self.seconds, DATASET, self._training),
            available=system_bytes(AVAILABLE),
            compiled=compilation(),
            loaders=[(*line, count / max(self._all, 1)) for line, count in self.loaders.most_common(1)],
            growing=self.growing.data(),
            clock=self.clock.data(),
            pace=self.pace.data(self.iterations) if self.pace else {},
            settings=self.settings.data(),
            variables=variables(),
        )

    def _wall(self) -> dict[str, Any]:
        ended = self.iterations.ended
        doing: Any = defaultdict(Counter)
        looked = [(bisect_left(ended, at), what, seconds) for at, what, seconds in list(self.looked)]
        for index, (activity, _), seconds in looked:
            doing[index][activity] += seconds
        kinds = self.iterations.kinds(doing)
        stacks: Any = defaultdict(Counter)
        for index, what, seconds in looked:
            if index < len(kinds):
                stacks[kinds[index]][what] += seconds
        return wall_time(self.iterations, kinds, stacks, self.calls.ran)


def compilation() -> dict[str, Any]:
    """What torch.compile did: seconds, graphs, where and why they break, why it compiled again; each reason once."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    graphs = dynamo.get_compilation_metrics() if dynamo else []
    if not graphs:
        return {}
    breaks: dict[tuple[str, int], str] = {}
    for reason in dynamo.graph_break_reasons:
        stack = [each for each in reason.user_stack if not is_library(each.filename)] or reason.user_stack
        if reason.graph_break and stack:
            breaks.setdefault((stack[-1].filename, stack[-1].lineno), _short(reason.reason.partition("\n")[0]))
    for each in graphs:
        if each.fail_type and each.fail_user_frame_filename:
            at, why = (each.fail_user_frame_filename, each.fail_user_frame_lineno), each.fail_reason or each.fail_type
            breaks[at] = f"{_short(why.partition(chr(10))[0])}; all of {each.co_name} runs uncompiled"
    again = [_short(each.recompile_reason) for each in graphs if each.recompile_reason]
    return {
        "seconds": sum(each.entire_frame_compile_time_s or 0.0 for each in graphs),
        "graphs": len(graphs),
        "breaks": [[*at, why] for at, why in breaks.items()],
        "again": list(dict.fromkeys(again)),
    }


def _short(reason: str) -> str:
    return " ".join(reason.split())[:200]
