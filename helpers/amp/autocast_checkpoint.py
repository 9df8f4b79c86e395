"""How `torch.utils.checkpoint` comes to recompute, in backward, under the `Autocast` of the forward.

It restores torch's own autocast for the second run, which knows nothing of ours, and there is no call in
backward, outside any region, that a mode would see. So the function that a checkpoint has kept for its second run
is bound to the settings of the first, while the first runs. What is changed is that one checkpoint's own record
of its function; torch stays as it is. Where a version of torch keeps it elsewhere, nothing is bound: the
recomputation then differs from the forward, which the not reentrant checkpoint notices and reports.
"""

from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils import checkpoint

_FRAMES_UP = 5


def bind_frame(pack_hook: Callable, settings: Any) -> None:
    """Not reentrant: the function runs under saved-tensor hooks, whose closure holds the checkpoint's frame."""
    names = getattr(getattr(pack_hook, "__code__", None), "co_freevars", ())
    if getattr(pack_hook, "__module__", None) == checkpoint.__name__ and "frame" in names:
        _bind_once(pack_hook.__closure__[names.index("frame")].cell_contents, "recompute_fn", settings)


def bind_context(caller: FrameType | None, settings: Any) -> None:
    """Reentrant: an autograd function runs it with gradients turned off, the one call in there that a mode sees. The
    function is in its context, a few callers up from that call."""
    for _ in range(_FRAMES_UP):
        if caller is None:
            return
        if caller.f_code is checkpoint.CheckpointFunction.forward.__code__:
            _bind_once(caller.f_locals["ctx"], "run_function", settings)
            return
        caller = caller.f_back


def _bind_once(owner: Any, attribute: str, settings: Any) -> None:
    if not hasattr(owner, "autocast_settings"):
        owner.autocast_settings = settings
        setattr(owner, attribute, settings.bind(getattr(owner, attribute)))
