"""Regions: where they begin and end, what is cast in them and how often, torch.autocast and torch.compile inside."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.amp import Autocast
from helpers.amp.autocast import policies
from helpers.lab.precision import autocast_dtype, without_autocast

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.ones(4, 4)


def product():
    return (X @ X).dtype


def test_regions_nest_and_end():
    region = Autocast(BF16)
    with region:
        with Autocast(FP16), region:
            assert product() == BF16
        with Autocast(FP16), Autocast(enabled=False):
            assert product() == FP32
            with region:
                assert product() == BF16
        with pytest.raises(ZeroDivisionError), Autocast(FP16):
            assert product() == FP16
            _ = 1 / 0
        assert product() == BF16
    assert product() == FP32
    assert torch._C._len_torch_function_stack() == 0 and not torch.is_autocast_enabled("cpu")


def test_as_a_decorator():
    with pytest.raises(TypeError, match="not a Tensor"):
        Autocast(BF16)(X)

    @Autocast(BF16)
    def double(x, *, factor=2):
        return (x @ x) * factor

    assert double.__name__ == "double" and double(X, factor=3).dtype == BF16
    assert product() == FP32


def test_settings():
    with Autocast(FP32, enabled=False):
        assert product() == FP32
    with pytest.raises(ValueError, match="dtype"):
        Autocast(FP32)
    with pytest.raises(RuntimeError, match="gpu"), Autocast(device_type="gpu"):
        pass
    with Autocast(device_type="cuda"):
        assert product() == FP32


def test_another_thread_is_outside():
    with Autocast(BF16), ThreadPoolExecutor(1) as pool:
        assert pool.submit(product).result() == FP32


def test_other_modes_inside_and_outside():
    with Autocast(BF16), torch.device("cpu"):
        assert product() == BF16
    with torch.device("cpu"), Autocast(BF16):
        assert product() == BF16


def test_the_casts_are_not_torchs(monkeypatch):
    """The region switches torch.autocast's flags on, but its casts off."""
    monkeypatch.setattr("helpers.amp.autocast.policies", dict)
    with Autocast(BF16):
        assert torch.is_autocast_enabled("cpu")
        assert product() == FP32
        assert nn.Linear(4, 4)(X).dtype == nn.MultiheadAttention(4, 2)(X, X, X)[0].dtype == FP32


def test_fp64_integers_in_place_and_out_are_left_alone():
    y, out = X.clone(), torch.empty(4, 4)
    with Autocast(BF16):
        for dtype in (torch.float64, torch.int64, torch.complex64):
            assert (X.to(dtype) @ X.to(dtype)).dtype == dtype
        assert y.addmm_(X, X).dtype == FP32
        assert torch.mm(X, X, out=out).dtype == FP32


CASES = {
    "linear": lambda x: F.linear(x, x),
    "@": lambda x: x @ x,
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.unsqueeze(0)] * 3),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "softmax": lambda x: F.softmax(x, -1),
    "softmax, type asked": lambda x: x.softmax(-1, FP16),
    "sum": lambda x: x.sum(),
    "normalize": lambda x: F.normalize(x),
    "exp": lambda x: x.exp(),
    "1 /": lambda x: 1 / x,
    "gelu": lambda x: F.gelu(x),
    "interpolate": lambda x: F.interpolate(x.view(1, 1, 4, 4), scale_factor=2, mode="bilinear"),
    "cat of two types": lambda x: torch.cat([x, x.float()]),
    "cross_entropy": lambda x: F.cross_entropy(x, x),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "pad": lambda x: F.pad(x.unsqueeze(0), (1, 1), mode="reflect"),
    "eigenvalues": lambda x: torch.linalg.eigvals(x).real,
}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_lists_name_all_that_torch_casts(kind):
    """But for operators that only others call."""
    inside = ("_cpu_fallback", "_rnn_layer", "_forward", "_fused_gru_cell", "_fused_lstm_cell", "_flash_attention")
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{kind.upper()}")
    casts = {name.removeprefix("aten::").partition(".")[0] for name in registered if name.startswith("aten::")}
    casts = {name for name in casts if not name.endswith(inside) and not name.startswith(("cudnn", "grid_sampler_"))}
    listed = {function.__name__ for function, kinds in policies().items() if kind in kinds}
    assert casts <= listed


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", CASES)
def test_types_are_those_of_torch_autocast(name, kind):
    """On fake tensors, which know types and devices and need no GPU."""

    def types():
        return [CASES[name](torch.ones(4, 4, dtype=dtype, device=kind)).dtype for dtype in (FP32, FP16, torch.float64)]

    with FakeTensorMode():
        with Autocast(FP16, device_type=kind):
            ours = types()
        torch.set_autocast_dtype(kind, FP16)  # torch.autocast("cuda") would ask for a GPU
        torch.set_autocast_enabled(kind, True)
        try:
            assert types() == ours
        finally:
            torch.set_autocast_enabled(kind, False)


def test_a_loss_that_is_not_safe_says_what_to_use():
    with FakeTensorMode(), Autocast(device_type="cuda"), pytest.raises(RuntimeError, match="_with_logits"):
        F.binary_cross_entropy(torch.ones(4, device="cuda"), torch.ones(4, device="cuda"))


def test_the_type_can_be_asked_for():
    assert autocast_dtype(X) is None
    for region in (Autocast(BF16), torch.autocast("cpu", BF16)):
        with region:
            assert autocast_dtype(X) == BF16
            assert autocast_dtype(X.double()) is None
            with without_autocast(X):
                assert product() == FP32
            with Autocast(enabled=False):
                assert autocast_dtype(X) is None


def test_torch_autocast_inside_has_its_effect_until_it_ends():
    layer = nn.Linear(4, 4)
    with Autocast(FP16):
        assert layer(X).dtype == FP16
        with torch.autocast("cpu", enabled=False):
            assert layer(X).dtype == product() == FP32
            with Autocast(BF16):
                assert product() == BF16
        with torch.autocast("cpu", dtype=BF16):
            assert torch.isfinite(F.linear(1e5 * X, X)).all()
            assert product() == BF16
        assert product() == FP16
    with Autocast(enabled=False), torch.autocast("cpu", dtype=BF16):
        assert product() == BF16


@pytest.mark.parametrize("where", ["inside", "around"])
def test_compiled_functions_compute_what_they_compute_under_torch_autocast(where):
    torch._dynamo.reset()
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), torch.randn(8, 4)

    def inside(x):
        with Autocast(BF16):
            return layer(x)

    compiled = torch.compile(inside if where == "inside" else layer, backend="eager")
    with torch.autocast("cpu", BF16):
        expected = layer(x)
    with Autocast(BF16) if where == "around" else contextlib.nullcontext():
        torch.testing.assert_close(compiled(x), expected, rtol=0, atol=0)
    assert torch._C._len_torch_function_stack() == 0 and product() == FP32
    torch._dynamo.reset()


class Casts(TorchDispatchMode):
    """Counts the casts."""

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_a_weight_is_cast_once_in_the_outermost_region():
    layer, x = nn.Linear(4, 4, bias=False), X.bfloat16()
    with Casts() as casts, Autocast(BF16):
        layer(x), layer(x)
        with Autocast(enabled=False), Autocast(BF16):
            layer(x)
        assert casts.count == 1
        with Autocast(BF16, cache_enabled=False):
            layer(x), layer(x)
        assert casts.count == 3
        F.linear(x, layer.weight.view(4, 4)), F.linear(x, layer.weight * 1)  # no leaf weights
        assert casts.count == 5
    with Casts() as casts, Autocast(BF16):
        layer(x)
    assert casts.count == 1


def test_a_weight_that_changes_in_a_region_is_cast_again():
    layer = nn.Linear(4, 4, bias=False)
    with Autocast(BF16):
        with torch.inference_mode():
            layer(X)
        layer(X).sum().backward()
        assert layer.weight.grad is not None  # though it was first cast without a graph
        torch.optim.SGD(layer.parameters(), 1.0).step()
        torch.testing.assert_close(layer(X), X.bfloat16() @ layer.weight.bfloat16().T)
