"""What torch's autocast asks of operations that it doesn't know, and that cast for themselves."""

import torch


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The type that a region of `torch.autocast` wants for products on this kind of device; None outside of one.

    A compiler traces it: torch 2.11's can't ask whether a kind of device has autocast at all, and need not.
    """
    has_autocast = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if has_autocast and torch.is_autocast_enabled(kind) else None
