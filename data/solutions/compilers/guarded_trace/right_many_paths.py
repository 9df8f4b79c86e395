import torch
from torch.overrides import TorchFunctionMode


class Recorder(TorchFunctionMode):
    """records every torch call; tensors are known by identity"""

    def __init__(self, inputs):
        super().__init__()
        self.known = {id(t): n for n, t in enumerate(inputs)}
        self.alive = list(inputs)
        self.program = []

    def ref(self, v):
        if isinstance(v, torch.Tensor) and id(v) in self.known:
            return ("ref", self.known[id(v)])
        if isinstance(v, (tuple, list)):
            return ("seq", [self.ref(e) for e in v])
        return ("const", v)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        call = (func, [self.ref(a) for a in args], {k: self.ref(v) for k, v in (kwargs or {}).items()})
        if isinstance(out, torch.Tensor):
            self.known[id(out)] = len(self.alive)
            self.alive.append(out)
            self.program.append((call, False, None))
        else:
            self.program.append((call, True, out))
        return out


def value(ref, env):
    kind, v = ref
    if kind == "ref":
        return env[v]
    return [value(e, env) for e in v] if kind == "seq" else v


def equal(a, b):
    same = a == b
    return bool(same.all()) if hasattr(same, "all") else bool(same)


def record(fn, args):
    args = [a.clone() for a in args]
    with Recorder(args) as r:
        out = fn(*args)
    return r.program, r.ref(out)


def replay(path, args):
    program, out = path
    env = list(args)
    for (func, a, k), guard, expected in program:
        got = func(*[value(x, env) for x in a], **{n: value(x, env) for n, x in k.items()})
        if guard:
            if not equal(got, expected):
                return False, None
        else:
            env.append(got)
    return True, value(out, env)


def guarded_trace(fn, example):
    paths = [record(fn, example)]

    def call(*args):
        for path in paths:
            ok, out = replay(path, args)
            if ok:
                return out
        paths.append(record(fn, args))
        return replay(paths[-1], args)[1]

    return call
