"""TorchScript is deprecated: what torch itself says of each of its calls, and what torch.export does in its place."""

import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import capture, semantics, words

# What is there for each, by torch's documentation. `freeze` and its kind optimise a graph, which a compiler does.
SUCCESSORS = {
    "torch.jit.trace": "torch.export.export",
    "torch.jit.script": "torch.export.export, with torch.cond and while_loop",
    "torch.jit.save": "torch.export.save",
    "torch.jit.load": "torch.export.load",
    "torch.jit.freeze": "torch.compile",
    "torch.jit.optimize_for_inference": "torch.compile",
}


def deprecations() -> list[dict[str, str]]:
    """Call what TorchScript consists of, and return a row a call: what it warned of, if it did.

    `deprecated` is whether a warning of the kind that announces a removal was caught in this call, now.
    """
    rows = []
    for name, call in _calls().items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        about = [w for w in caught if name in str(w.message) and issubclass(w.category, _ANNOUNCE)]
        row = {
            "call": name,
            "deprecated": "yes" if about else "no",
            "said": words.of_warning(about[0]) if about else "",
        }
        rows.append(row | {"successor": SUCCESSORS[name], "torch": torch.__version__})
    return rows


_ANNOUNCE = (DeprecationWarning, FutureWarning, PendingDeprecationWarning)


def _calls() -> dict[str, Callable[[], Any]]:
    module, x = nn.Linear(2, 2).eval(), torch.zeros(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted, saved = torch.jit.script(module), io.BytesIO()
        torch.jit.save(scripted, saved)
    return {
        "torch.jit.trace": lambda: torch.jit.trace(module, x),
        "torch.jit.script": lambda: torch.jit.script(module),
        "torch.jit.save": lambda: torch.jit.save(scripted, io.BytesIO()),
        "torch.jit.load": lambda: torch.jit.load(io.BytesIO(saved.getvalue())),
        "torch.jit.freeze": lambda: torch.jit.freeze(scripted),
        "torch.jit.optimize_for_inference": lambda: torch.jit.optimize_for_inference(torch.jit.script(module)),
    }


class Gated(nn.Module):
    """A small network with a branch on its data, written so that torch.export takes all of it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(self.up(x))  # (B, 2·width)
        return self.down(torch.cond(x.sum() > 0, lambda h: h * 2, lambda h: -h, (h,)))


def round_trip(batches: tuple[int, ...] = (1, 3, 64), width: int = 8) -> list[dict[str, Any]]:
    """torch.export in TorchScript's place: exported with a batch of any size, saved, loaded, and run.

    A row for each batch and each branch: whether what came back from its bytes (in memory, no file is written) agrees
    with the module.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(semantics.SEED)
        module = Gated(width).eval()
    exported = capture.exported(module, (torch.randn(4, width),), dynamic=({0: torch.export.Dim.DYNAMIC},))
    saved = io.BytesIO()
    torch.export.save(exported, saved)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*buffer is not writable")  # torch's own reading of the bytes
        loaded = torch.export.load(io.BytesIO(saved.getvalue())).module()
    rows = []
    for batch in batches:
        for sign in (1, -1):
            x = sign * torch.rand(batch, width)
            with torch.no_grad():
                agrees = semantics.same(loaded(x), module(x))
            branch = "h * 2" if sign > 0 else "-h"
            rows.append({"batch": batch, "branch": branch, "agrees": agrees})
    return rows
