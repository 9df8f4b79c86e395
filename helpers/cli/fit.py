"""`dlspeed fit …`."""

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .shared import add_json, count, fail, positive, tell

if TYPE_CHECKING:
    from ..fit import Card

ABOUT = "Where a training step's memory goes, whether it fits, and what would make it fit."
MODELS = (
    "a preset (default: llama-3.2-1b), a config.json, a class of transformers, or module:function, whose result for a "
    "batch size is a module and its example batch"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="llama-3.2-1b", help=MODELS)
    add("--batch", type=count, default=8, help="sequences of a step, over all ranks (default: 8)")
    add("--sequence", type=count, default=2048, metavar="TOKENS", help="default: 2048")
    add("--strategy", default="single", help="single, ddp, zero2 or zero3 (default: single)")
    add("--ranks", type=count, default=1, help="default: 1")
    add("--memory", type=positive, metavar="GIB", help="of each device (default: this machine's)")
    add("--precision", default="amp-bf16", help="fp32, amp-bf16, or on one device bf16")
    add("--checkpointing", default="none", help="none, full, or on one device selective")
    add("--head", default="full", help="full, or on one device chunked")
    add("--gpu", metavar="NAME", help="predict the speed on this GPU, too: t4, h100, rtx4090 …")
    add("--peak-tflops", type=positive, metavar="T", help="dense bf16 peak of a GPU without a name here")
    add("--bandwidth", type=positive, metavar="GB/S", help="of such a GPU's memory")
    add("--price", type=positive, metavar="P", help="of a GPU and hour: the cost of 10⁹ tokens")
    add("--page", type=Path, metavar="FILE", help="only write a page to play with, of many settings")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    import torch

    from .. import fit

    if options.page:
        return _write_page(options.page)
    plan = fit.Plan(**{field.name: getattr(options, field.name) for field in dataclasses.fields(fit.Plan)})
    result: dict[str, Any] = {}
    faults: list[ValueError] = []
    try:
        gpu = _card(options)
        plan.check()
    except ValueError as error:  # what the user chose
        return fail(error, 2)
    memory = gpu.memory_gib or None if gpu and options.memory is None else options.memory
    forks = 0 if torch.cuda.is_available() else min(os.cpu_count() or 1, 4)
    parts = [lambda: fit.fit(plan, memory, forks)]
    parts += [lambda: {"speed": fit.estimate(fit.plan_run(plan), gpu, options.price)}] if gpu else []
    for part in parts:
        try:
            result |= part()
        except ValueError as error:  # of a model of somebody else's only one part may be known
            faults.append(error)
    if not result:
        return fail(faults[0], 2)
    for fault in faults:
        tell(f"dlspeed: {fault}")
    texts = [fit.text(result)] if "fits" in result else []
    texts += [fit.estimate_text(result["speed"])] if "speed" in result else []
    print(json.dumps(result) if options.json else "\n".join(texts))
    return 0


def _write_page(path: Path) -> int:
    from ..fit.page import page

    if not os.access(path.absolute().parent, os.W_OK):  # said before the minutes that it takes
        return fail(f"{path} can't be written", 1)
    path.write_text(page(), encoding="utf-8")
    return 0


def _card(options: argparse.Namespace) -> "Card | None":
    """The GPU that `fit` is asked for, by name or by its rates; None if it isn't."""
    from ..fit import Card
    from ..lab.cards import card

    if options.gpu:
        return card(options.gpu)
    if options.peak_tflops is options.bandwidth is options.price is None:
        return None
    if options.peak_tflops is None or options.bandwidth is None:
        raise ValueError("which GPU? give --gpu, or both --peak-tflops and --bandwidth")
    rates = {"bf16_tflops": options.peak_tflops, "gb_per_s": options.bandwidth}
    return Card(gpu="your GPU", memory_gib=options.memory or 0.0, **rates)
