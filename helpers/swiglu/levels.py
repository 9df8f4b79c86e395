"""The checkpoint levels, and the checks of what a caller hands in."""

import torch
from torch import Tensor

KEEP_ALL, KEEP_INPUT, KEEP_TWO, KEEP_8BIT = 0, 1, 2, 3

# level -> what it keeps for backward
LEVELS = {
    KEEP_ALL: "x, xW, SiLU(xW), xV",
    KEEP_INPUT: "x",
    KEEP_TWO: "x, xW, xV",
    KEEP_8BIT: "x, xW and xV in 8 bits",
}

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_level(level: int) -> int:
    if type(level) is not int or level not in LEVELS:
        allowed = "; ".join(f"{n} keeps {kept}" for n, kept in LEVELS.items())
        raise ValueError(f"checkpoint_level is {level!r}; allowed: {allowed}")
    return level


def check_arguments(x: Tensor, W: Tensor, V: Tensor, U: Tensor, *, casting: bool) -> None:
    """Raise a `ValueError` that names what was given and what is allowed. `casting`: autocast makes dtypes agree."""
    for name, given in {"x": x, "W": W, "V": V, "U": U}.items():
        if not isinstance(given, Tensor):
            raise ValueError(f"{name} is a {type(given).__name__}; it must be a tensor")
    if W.ndim != 2 or V.shape != W.shape or U.shape != W.shape[::-1]:
        shapes = f"W {tuple(W.shape)}, V {tuple(V.shape)}, U {tuple(U.shape)}"
        raise ValueError(f"shapes of {shapes}; W and V must be (hidden, intermediate), U (intermediate, hidden)")
    if x.ndim == 0 or x.shape[-1] != W.shape[0]:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last dimension must be the hidden size, {W.shape[0]}")
    if x.dtype in DTYPES and all(w.dtype == x.dtype and w.device == x.device for w in (W, V, U)):
        return
    named = {"x": x, "W": W, "V": V, "U": U}
    devices = {name: tensor.device for name, tensor in named.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"mixed devices: {_listed(devices)}; x and the weights must be on one device")
    dtypes = {name: tensor.dtype for name, tensor in named.items()}
    if not set(dtypes.values()) <= set(DTYPES):
        raise ValueError(f"dtypes {_listed(dtypes)}; allowed: {', '.join(map(str, DTYPES))}")
    if not casting:
        raise ValueError(
            f"mixed dtypes: {_listed(dtypes)}; they must be one dtype, or use torch.autocast (which leaves fp64 alone)"
        )


def _listed(named: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in named.items())
