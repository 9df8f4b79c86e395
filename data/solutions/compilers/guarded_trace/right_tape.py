import numpy as np
import torch
from torch.utils._pytree import tree_map


class Slot(int):
    pass


class Taped(torch.Tensor):
    @classmethod
    def __torch_function__(cls, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = op(*args, **kwargs)
        inputs = tree_map(lambda v: v.slot if isinstance(v, Taped) else v, (args, kwargs))
        if isinstance(result, torch.Tensor):
            return cls.tape.add(op, inputs, result)
        cls.tape.steps.append((op, inputs, result))
        return result


class Tape:
    def __init__(self, fn, example):
        self.steps, self.count = [], 0
        Taped.tape = self
        self.result = fn(*[self.add(None, None, x.clone()) for x in example])

    def add(self, op, inputs, result):
        result = result.as_subclass(Taped)
        result.slot, self.count = Slot(self.count), self.count + 1
        if op:
            self.steps.append((op, inputs, None))
        return result

    def play(self, arguments):
        """The result, or None where a guard doesn't hold."""
        values = list(arguments)
        for op, inputs, expected in self.steps:
            args, kwargs = tree_map(lambda v: values[v] if isinstance(v, Slot) else v, inputs)
            value = op(*args, **kwargs)
            if expected is None:
                values.append(value)
            elif not np.array_equal(np.asarray(value), np.asarray(expected)):
                return None
        return values[self.result.slot] if isinstance(self.result, Taped) else self.result


def guarded_trace(fn, example):
    tape = Tape(fn, example)

    def captured(*arguments):
        nonlocal tape
        result = tape.play(arguments)
        if result is None:
            tape = Tape(fn, arguments)
            result = tape.play(arguments)
        return result

    return captured
