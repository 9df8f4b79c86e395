"""Start ranks on this machine, and end them all when one fails; join the process group from inside a rank.

`launch` costs an interpreter start and an import of torch for each rank: some seconds, once for any number of jobs.
`torchrun` starts ranks too, on one machine or many; a worker that uses `joined` runs under both.
"""

import contextlib
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, spawn

RENDEZVOUS = "RUSH_RENDEZVOUS"  # set by `launch`; torchrun sets MASTER_ADDR and MASTER_PORT


class RankFailed(RuntimeError):
    """A rank raised or died; the message has the rank, and its traceback if it raised."""


@contextlib.contextmanager
def joined(backend: str, timeout_s: float = 50.0) -> Iterator[torch.device]:
    """A context with a process group of all ranks; yields this rank's device.

    Collectives wait `timeout_s` for a rank of another machine that is gone; on one machine a failure ends all at once.

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
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            spawn(_run_rank, (ranks, folder, worker, arguments), nprocs=ranks)
        except ProcessExitedException as error:
            failed = sorted(Path(folder).glob("failed-*"), key=lambda file: file.stat().st_mtime_ns)
            if error.signal_name or not failed:
                how = f"was killed by {error.signal_name}" if error.signal_name else f"exited with {error.exit_code}"
                raise RankFailed(f"rank {error.error_index} {how}") from None
            raise RankFailed(f"rank {failed[0].name.removeprefix('failed-')}: {failed[0].read_text()}") from None
        return [pickle.loads(Path(folder, f"done-{rank}").read_bytes()) for rank in range(ranks)]


def _run_rank(rank: int, ranks: int, folder: str, worker: Callable, arguments: tuple) -> None:
    """The main function of a process: writes the worker's result into the folder, or its traceback."""
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ[RENDEZVOUS] = Path(folder, "store").as_uri()
    torch.set_num_threads(max((os.cpu_count() or 1) // ranks, 1))
    try:
        Path(folder, f"done-{rank}").write_bytes(pickle.dumps(worker(*arguments)))
    except BaseException:
        Path(folder, f"failed-{rank}").write_text(traceback.format_exc())
        end(1)  # a regular shutdown would wait for peers that are about to be ended
    end(0)
