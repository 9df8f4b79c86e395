"""`dlspeed train …`."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .shared import fail

if TYPE_CHECKING:
    from ..train import Setup

ABOUT = "Train a task in a chosen precision; the last line is the result as JSON."


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--task", default="lm", help="lm or segmentation (default: lm)")
    add("--precision", default="dynamic", help="fp32, fp16, bf16, amp, static, dynamic or torch-scaler")
    add("--autocast", default="ours", choices=("ours", "torch"))
    add("--data", default="standard", help="base, standard, balanced or sequenced")
    add("--preset", default="small", choices=("small", "reduced", "long", "full"))
    add("--epochs", type=int, default=5)
    add("--seed", type=int, default=0)
    add("--clip", type=float, help="the largest norm of the gradients")
    add("--growth-interval", type=int, default=50, help="good steps before the dynamic scale grows")
    add("--path", type=Path, help="WikiText or Carvana; generated data without")
    add("--stages", help='a training of chapter 0: "all", "none", or names such as "batching,compile"')


def run(options: argparse.Namespace) -> int:
    from .. import train as training

    try:
        names = [field.name for field in dataclasses.fields(training.Setup)]
        setup = training.Setup(**{name: getattr(options, name) for name in names})
        row = training.train(setup) if options.stages is None else _train_by_stages(options.stages, setup)
    except ValueError as error:  # what the user chose, or the data that was given
        return fail(error, 2)
    print(json.dumps(row))
    return 0


def _train_by_stages(chosen: str, setup: "Setup") -> dict[str, Any]:
    """The language model's training with stages switched on, which say what other options would."""
    from ..training.stages import STAGES, environment, run, run_apart

    free = {name: getattr(setup, name) for name in ("preset", "epochs", "seed", "path")}
    if setup != type(setup)(**free):
        raise ValueError(f"--stages switches the rest itself; with it go {', '.join(f'--{name}' for name in free)}")
    named = {"all": list(STAGES), "none": []}
    stages = named.get(chosen, [name.strip() for name in chosen.split(",")])
    return (run_apart if environment() else run)(stages, **free)
