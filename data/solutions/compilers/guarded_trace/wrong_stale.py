# Another path is traced anew, but its result is remembered for all that follow.
# says: the example again: wrong
import torch


def guarded_trace(fn, example):
    first = [x.clone() for x in example]
    state = {"result": fn(*example), "fixed": False}

    def call(*args):
        same = all(a.shape == f.shape and torch.equal(a, f) for a, f in zip(args, first))
        if not same and not state["fixed"]:
            state.update(result=fn(*args), fixed=True)
        return state["result"]

    return call
