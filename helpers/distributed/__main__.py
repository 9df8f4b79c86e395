"""`torchrun -m helpers.distributed …`, or `python -m helpers.distributed --ranks N …` on one machine.

Rank 0 prints one line of JSON. A wrong option gives one line on stderr and exit code 2, before anything is allocated. A
failing rank ends all ranks, with its error and exit code 1.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import record

from . import measure, work
from .launch import RankFailed, end, under_torchrun
from .strategies import CHOICES, Job

PROGRAM = __package__
HELP = {
    "model": "a preset of helpers.models.Llama",
    "batch": "sequences of a step, over all ranks",
    "accumulate": "micro-batches of a step",
    "precision": "amp-bf16: fp32 parameters, bf16 compute",
    "bucket_mib": "ddp: average gradients in pieces of so many MiB",
    "timeout_s": "how long a rank waits for one that is gone",
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> None:
        raise ValueError(message)


def arguments_parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description="Train a Llama on many ranks; print a row of JSON.")
    if under_torchrun():
        parser.set_defaults(ranks=int(os.environ["WORLD_SIZE"]))
    else:
        parser.add_argument("--ranks", type=int, default=1, help="processes to start here; torchrun starts its own")
    for field in dataclasses.fields(Job):
        flag = "--" + field.name.replace("_", "-")
        choices = f"one of {', '.join(CHOICES[field.name])}" if field.name in CHOICES else ""
        text = "; ".join(filter(None, (HELP.get(field.name), choices)))
        kind = int if field.name == "layers" else type(field.default)
        parser.add_argument(flag, type=kind, default=field.default, help=f"{text} ({field.default})".strip())
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        chosen = vars(arguments_parser().parse_args(arguments))
        ranks = chosen.pop("ranks")
        job = Job(**chosen)
        job.check(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    except ValueError as error:
        print(f"{PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    if under_torchrun():
        return _as_a_rank(job)
    try:
        [row] = measure([job], ranks)
    except RankFailed as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(row))
    return 0


@record  # so that torchrun names the error of the rank that failed first
def _as_a_rank(job: Job) -> int:
    [row] = work([job])
    if os.environ["RANK"] == "0":
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    (end if under_torchrun() else sys.exit)(main())
