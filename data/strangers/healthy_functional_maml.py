"""Meta-learning of waveforms, written as pure functions over parameter pytrees (torch.func)."""
import math
import time
from functools import partial

import torch
from torch.func import grad, grad_and_value, vmap
from torch.utils import _pytree as pytree

TASKS, SHOTS, QUERY = 32, 20, 40
INNER_LR, INNER_STEPS, META_LR = 0.02, 3, 1e-3
WIDTH, FEATURES = 192, 16


def tree_map(fn, *trees):
    leaves = [pytree.tree_flatten(t) for t in trees]
    return pytree.tree_unflatten([fn(*xs) for xs in zip(*(l for l, _ in leaves))], leaves[0][1])


def init_params(gen, sizes):
    def layer(n_in, n_out):
        return {"w": torch.randn(n_in, n_out, generator=gen) * math.sqrt(2 / n_in), "b": torch.zeros(n_out)}
    return [layer(a, b) for a, b in zip(sizes, sizes[1:])]


def featurize(x):
    k = torch.arange(1, FEATURES // 2 + 1, dtype=x.dtype) * 0.6
    return torch.cat([torch.sin(x * k), torch.cos(x * k)], -1)


def apply(params, x):
    for p in params[:-1]:
        x = torch.relu(x @ p["w"] + p["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def mse(params, x, y):
    return (apply(params, x) - y).square().mean()


def adapt(params, x, y):
    for _ in range(INNER_STEPS):
        g = grad(mse)(params, x, y)
        params = tree_map(lambda p, d: p - INNER_LR * d, params, g)
    return params


def task_loss(params, xs, ys, xq, yq):
    return mse(adapt(params, xs, ys), xq, yq)


def meta_loss(params, batch):
    return vmap(partial(task_loss, params))(*batch).mean()


def adam_init(params):
    zeros = lambda p: torch.zeros_like(p)
    return {"m": tree_map(zeros, params), "v": tree_map(zeros, params), "t": 0}


def adam_update(params, grads, state, lr, b1=0.9, b2=0.999, eps=1e-8):
    leaves, spec = pytree.tree_flatten(params)
    g, m, v = (pytree.tree_leaves(t) for t in (grads, state["m"], state["v"]))
    t = state["t"] + 1
    m = torch._foreach_lerp(m, g, 1 - b1)
    v = torch._foreach_lerp(v, torch._foreach_mul(g, g), 1 - b2)
    denom = torch._foreach_add(torch._foreach_sqrt(torch._foreach_div(v, 1 - b2 ** t)), eps)
    new = torch._foreach_addcdiv(leaves, m, denom, -lr / (1 - b1 ** t))
    pack = lambda xs: pytree.tree_unflatten(list(xs), spec)
    return pack(new), {"m": pack(m), "v": pack(v), "t": t}


def sample_tasks(gen):
    def rand(*shape, lo, hi):
        return torch.empty(*shape).uniform_(lo, hi, generator=gen)
    amp, freq, phase = rand(TASKS, 1, 1, lo=0.5, hi=3), rand(TASKS, 1, 1, lo=0.5, hi=2), rand(TASKS, 1, 1, lo=0, hi=6.28)
    x = rand(TASKS, SHOTS + QUERY, 1, lo=-4, hi=4)
    y = amp * torch.sin(freq * x + phase)
    f = featurize(x)
    return f[:, :SHOTS], y[:, :SHOTS], f[:, SHOTS:], y[:, SHOTS:]


def train_step(params, state, batch):
    grads, loss = grad_and_value(meta_loss)(params, batch)
    params, state = adam_update(params, grads, state, META_LR)
    return params, state, loss


def main(steps=4000):
    gen = torch.Generator().manual_seed(0)
    params = init_params(gen, [FEATURES, WIDTH, WIDTH, WIDTH, 1])
    state = adam_init(params)
    tic, avg = time.time(), None
    for step in range(1, steps + 1):
        params, state, loss = train_step(params, state, sample_tasks(gen))
        avg = loss if avg is None else 0.98 * avg + 0.02 * loss
        if step % 50 == 0:
            print(f"step {step:5d}  query mse {avg.item():.4f}  {1000 * (time.time() - tic) / 50:.0f} ms/step", flush=True)
            tic = time.time()


if __name__ == "__main__":
    main()
