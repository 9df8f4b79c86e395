# Guards on the inputs' shapes and dtypes, none on data.
# says: branch on data: the example, another path, the example again: wrong
import torch


def key(args):
    return tuple((tuple(a.shape), a.dtype) for a in args)


def guarded_trace(fn, example):
    graphs = {}

    def call(*args):
        if key(args) not in graphs:
            graphs[key(args)] = torch.jit.trace(fn, args, check_trace=False)
        return graphs[key(args)](*args)

    call(*example)
    return call
