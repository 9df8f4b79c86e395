"""Whether an operator of torch does work, by its schema: it returns a new tensor or writes into an argument."""

import functools
from typing import Any

import torch

_FREE = ("empty", "new_empty", "resize", "set_", "_unsafe_view")  # allocations, and a view whose schema hides it


@functools.cache
def works(name: str) -> bool:
    """Whether an operation (e.g. `aten::add`) does work, according to the schemas of its overloads."""
    space, _, operation = name.partition("::")
    if not operation or operation.startswith(_FREE):
        return False
    try:
        packet = getattr(getattr(torch.ops, space), operation)
    except (AttributeError, RuntimeError):  # an annotation
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return any(writes(op._schema) for op in overloads if torch.Tag.inplace_view not in op.tags)


def writes(schema: Any) -> bool:
    into = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    new = any(result.alias_info is None and "Tensor" in str(result.type) for result in schema.returns)
    return into or new
