"""Our AdamW: the kernels in Triton's interpreter, and torch's fused one where they don't run, against torch's loop."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import run_plain_or_interpreted

from helpers.rush.kernels import AdamW, adamw

SHAPES = [(1,), (5, 7), (1024,), (1025,), (2048,), (4100,), (0, 3)]


@pytest.fixture(params=["plain", "interpreted"], autouse=True)
def kernels(request, monkeypatch):
    return run_plain_or_interpreted(request, monkeypatch, adamw)


def parameters(shapes=SHAPES):
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def copies(params):
    return [p.detach().clone().requires_grad_() for p in params]


def give(gradients, *lists):
    for params in lists:
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = None if gradient is None else gradient.clone()


def random_gradients(params, scale=1.0):
    return [torch.randn_like(p) * scale for p in params]


def assert_equal(actual, expected, tolerance=2e-6):
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def reference(params, **options):
    return torch.optim.AdamW(params, foreach=False, **options)


@settings(max_examples=6, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 3, 4, 1023, 1024, 1028]), min_size=1, max_size=3),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.95, 0.0)]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_updates_are_torchs(sizes, betas, weight_decay, scale):
    ours = parameters([(size,) for size in sizes])
    theirs = copies(ours)
    options = {"lr": 1e-2, "betas": betas, "weight_decay": weight_decay}
    optimizers = AdamW(ours, **options), reference(theirs, **options)
    for _ in range(3):
        give(random_gradients(ours, scale), ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
    assert_equal(ours, theirs, 1e-5)
    for p, q in zip(ours, theirs, strict=True):
        a, b = optimizers[0].state[p], optimizers[1].state[q]
        assert float(a["step"]) == float(b["step"]) == 3
        for name, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
            assert_equal([a[name] / scale**power], [b[name] / scale**power], 1e-5)


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=5),
    offsets=st.lists(st.sampled_from([0, 4, 8, 16]), min_size=5, max_size=5),
)
def test_chunks_cover_every_element_once_and_wide_ones_neither_begin_nor_end_within_16_bytes(sizes, offsets):
    table = torch.zeros(len(sizes), adamw.COLUMNS, dtype=torch.int64)
    table[:, 5] = torch.tensor(sizes)
    table[:, 1] = torch.tensor(offsets[: len(sizes)])  # where the gradient begins
    covered = [torch.zeros(size) for size in sizes]
    for vector, chunks in adamw.cut(adamw.layout(table)).items():
        for tensor, chunk in chunks.tolist():
            begin, end = chunk * adamw.CHUNK, min((chunk + 1) * adamw.CHUNK, sizes[tensor])
            covered[tensor][begin:end] += 1
            assert vector == (offsets[tensor] % 16 == 0 and (end - begin) % 4 == 0)
    assert all(bool((count == 1).all()) for count in covered)


def test_tensors_that_begin_anywhere_and_lie_otherwise():
    whole = torch.randn(5000)
    ours = [whole[1:1030], whole[2000:4053], torch.randn(6, 40).t(), torch.randn(2, 8, 5, 5)]
    ours[3] = ours[3].contiguous(memory_format=torch.channels_last)
    theirs = [t.clone() for t in ours]
    for p in (*ours, *theirs):
        p.requires_grad_()
    gradients = [torch.randn(p.shape) for p in ours]  # contiguous, whatever the parameter is
    guard = whole[[0, 1030, 1999, 4053]].clone()
    optimizers = AdamW(ours), reference(theirs)
    for _ in range(2):
        give(gradients, ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
    assert_equal(ours, theirs)
    assert torch.equal(whole[[0, 1030, 1999, 4053]], guard)


def test_gradients_that_come_and_go_and_move():
    ours = parameters()
    theirs = copies(ours)
    optimizers = AdamW(ours), reference(theirs)
    for missing in (None, 2, None, 0):
        gradients = [None if i == missing else torch.randn_like(p) for i, p in enumerate(ours)]
        give(gradients, ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
    assert_equal(ours, theirs)
    AdamW(parameters()).step()  # none at all


@pytest.mark.parametrize("overflow", [0.0, 1.0])
def test_a_loss_scale_is_divided_out_and_an_overflow_skips_the_step(overflow):
    ours = parameters()
    theirs, gradients = copies(ours), random_gradients(ours)
    optimizer, torchs = AdamW(ours, lr=1e-2), reference(theirs, lr=1e-2)
    give(gradients, ours, theirs)
    for one in (optimizer, torchs):
        one.step()
    scaled = [gradient * 1024 for gradient in gradients]
    give(scaled, ours)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(overflow)
    optimizer.step()
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(ours, scaled, strict=True))
    if not overflow:
        torchs.step()
    assert_equal(ours, theirs)
    assert {float(optimizer.state[p]["step"]) for p in ours} == {1.0 if overflow else 2.0}


def test_torchs_scaler_drives_it():
    ours = parameters([(5, 7), (3,)])
    theirs = copies(ours)
    trained = [(ours, AdamW(ours)), (theirs, reference(theirs))]
    scales = []
    for params, optimizer in trained:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        for factor in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            loss = sum(p.square().sum() for p in params) * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert_equal(ours, theirs)
    assert scales[0] == scales[1]


@pytest.mark.parametrize("direction", ["from torch", "to torch"])
@pytest.mark.parametrize("fused", [False, True])
def test_checkpoints_are_torchs(direction, fused):
    def torchs(params):
        return torch.optim.AdamW(params, lr=1e-2, fused=fused)

    def triton_adamw(params):
        return AdamW(params, lr=1e-2)

    first, second = (torchs, triton_adamw) if direction == "from torch" else (triton_adamw, torchs)
    before = parameters()
    straight = copies(before)
    gradients = [random_gradients(before) for _ in range(4)]
    old, oracle = first(before), reference(straight, lr=1e-2)
    for drawn in gradients[:2]:
        give(drawn, before, straight)
        old.step()
        oracle.step()
    after = copies(before)
    new = second(after)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    for drawn in gradients[2:]:
        give(drawn, after, straight)
        new.step()
        oracle.step()
    assert_equal(after, straight)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_of_the_optimizer_goes_on_like_it(copied):
    ours = parameters()
    optimizer = AdamW(ours, lr=1e-2)
    give(random_gradients(ours), ours)
    optimizer.step()
    other = copied(optimizer)
    theirs = other.param_groups[0]["params"]
    give(random_gradients(ours), ours, theirs)
    for each in (optimizer, other):
        each.found_inf, each.grad_scale = torch.zeros(()), torch.full((), 4.0)
        each.step()
    assert_equal(ours, theirs)
    assert other._step_supports_amp_scaling  # or a scaler would divide by itself first


def test_groups_schedules_and_a_learning_rate_in_a_tensor():
    ours = parameters()
    theirs = copies(ours)
    optimizers = [
        make([{"params": params[:3], "lr": 1e-3, "weight_decay": 0.3}, {"params": params[3:]}], lr=1e-2)
        for make, params in ((AdamW, ours), (reference, theirs))
    ]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    for _ in range(3):
        give(random_gradients(ours), ours, theirs)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
    assert_equal(ours, theirs)
    start = parameters()
    pair = copies(start), copies(start)
    gradients = random_gradients(start)
    for params, lr in zip(pair, (1e-2, torch.tensor(1e-2)), strict=True):
        give(gradients, params)
        AdamW(params, lr=lr).step()
    assert_equal(*pair)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_updated_by_torch(dtype):
    ours = [torch.randn(30, dtype=dtype, requires_grad=True), torch.randn(30, requires_grad=True)]
    theirs = copies(ours)
    give([torch.randn_like(p) for p in ours], ours, theirs)
    AdamW(ours, lr=0.1).step()
    torch.optim.AdamW(theirs, lr=0.1, fused=True).step()
    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0, not -1.0"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"eps": float("nan")}, "eps must be at least 0, not nan"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW(parameters(), **options)
