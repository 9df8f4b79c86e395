"""Start ranks on this machine, and end them all when one fails; join the process group from inside a rank.

`launch` costs an interpreter start and an import of torch for each rank: some seconds, once for any number of jobs.
`torchrun` starts ranks too, on one machine or many; `joined` joins the group in both cases.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

# Timeout of collectives. It matters for ranks on other machines; on the same machine a failure ends all ranks at once.
TIMEOUT_S = 50
SETTLE_S = 2.0  # wait after the first reported failure for reports of earlier ones
RENDEZVOUS = "RUSH_RENDEZVOUS"  # set by `launch`; torchrun sets MASTER_ADDR and MASTER_PORT


class RankFailed(RuntimeError):
    """A rank raised or died; the message names rank and reason. `details` is its traceback, if it raised."""

    def __init__(self, rank: int, reason: str, details: str = "") -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank, self.details = rank, details


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def joined(backend: str, timeout_s: float = TIMEOUT_S) -> Iterator[torch.device]:
    """A context with a process group of all ranks; yields this rank's device.

    After an error the group isn't destroyed, as that would wait for ranks that are stuck because of the error.
    """
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=os.environ.get(RENDEZVOUS, "env://"),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    yield device
    dist.destroy_process_group()


def end(code: int) -> NoReturn:
    """Flush output and end this process without the interpreter's shutdown.

    A device mesh keeps its group's threads alive past `destroy_process_group`. If one frees a tensor during interpreter
    shutdown, it takes a lock that no longer exists and the process aborts, although the run has succeeded.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def launch(worker: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Results of `worker(*arguments)` on `ranks` new processes of this machine, by rank.

    The worker is imported by name in each process and finds RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in its
    environment. Raises `RankFailed` for the rank that failed first, after ending all others.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        rendezvous = (Path(folder) / "store").as_uri()
        pipes, processes = [], []
        try:
            for rank in range(ranks):
                receiver, sender = context.Pipe(duplex=False)
                inputs = (rank, ranks, rendezvous, sender, worker, arguments)
                process = context.Process(target=_run_rank, args=inputs, daemon=True)
                process.start()
                sender.close()
                pipes.append(receiver)
                processes.append(process)
            return _collect(processes, pipes)
        finally:
            _end(processes)


def _run_rank(rank: int, ranks: int, rendezvous: str, pipe: Connection, worker: Callable, arguments: tuple) -> None:
    """The main function of a process: sends ("done", result) or ("failed", when, reason, traceback)."""
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(number) for name, number in numbers.items()} | {RENDEZVOUS: rendezvous})
    torch.set_num_threads(max((os.cpu_count() or 1) // ranks, 1))
    try:
        pipe.send(("done", worker(*arguments)))
    except BaseException as error:
        pipe.send(("failed", time.time(), f"{type(error).__name__}: {error}", traceback.format_exc()))
        end(1)  # a regular shutdown would wait for peers that are about to be ended
    end(0)


def _collect(processes: list, pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str, str]] = []  # when, rank, reason, traceback
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline = None
    while waiting:
        ready = wait(list(waiting), None if deadline is None else max(deadline - time.time(), 0))
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            message = _received(pipe, processes[rank])
            if message[0] == "done":
                results[rank] = message[1]
                continue
            failures.append((message[1], rank, *message[2:]))
            deadline = deadline or time.time() + SETTLE_S
    if failures:
        _, rank, reason, details = min(failures)
        raise RankFailed(rank, reason, details)
    return [results[rank] for rank in range(len(pipes))]


def _received(pipe: Connection, process: Any) -> tuple:
    """A rank's message. A death without one counts as the first failure (time 0), as others fail because of it."""
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return "failed", 0.0, how, ""


def _end(processes: list) -> None:
    """Terminate the processes that still run, then kill them."""
    for method in ("terminate", "kill"):
        for process in processes:
            if process.is_alive():
                getattr(process, method)()
        deadline = time.time() + 5
        for process in processes:
            process.join(max(deadline - time.time(), 0.1))
