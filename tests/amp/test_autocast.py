"""Regions: where they begin and end, what they leave alone, that a weight is cast once, and torch left as it is."""

import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.amp import Autocast
from helpers.lab.precision import autocast_dtype, without_autocast

X = torch.ones(4, 4)


def product():
    return (X @ X).dtype


def test_regions_nest_and_end():
    with Autocast(torch.bfloat16):
        assert product() == torch.bfloat16
        with Autocast(torch.float16):
            assert product() == torch.float16
            with Autocast(enabled=False):
                assert product() == torch.float32
                with Autocast(torch.bfloat16):
                    assert product() == torch.bfloat16
            assert product() == torch.float16
        assert product() == torch.bfloat16
    assert product() == torch.float32
    with Autocast(enabled=False):
        assert product() == torch.float32
        with Autocast(torch.bfloat16):
            assert product() == torch.bfloat16
        assert product() == torch.float32


def test_one_object_can_be_entered_again_and_again():
    region = Autocast(torch.bfloat16)
    with region, region:
        with region:
            pass
        assert product() == torch.bfloat16
    assert product() == torch.float32
    with region:
        assert product() == torch.bfloat16


def test_an_exception_ends_the_region():
    with pytest.raises(ZeroDivisionError), Autocast(torch.bfloat16):
        with pytest.raises(RuntimeError), Autocast(torch.float16):
            F.layer_norm(X, (3,))
        assert product() == torch.bfloat16
        _ = 1 / 0
    assert product() == torch.float32
    assert torch._C._len_torch_function_stack() == 0


def test_as_a_decorator():
    @Autocast(torch.bfloat16)
    def double(x, *, factor=2):
        """Doubles."""
        return (x @ x) * factor

    assert double.__name__ == "double" and double.__doc__ == "Doubles."
    assert double(X, factor=3).dtype == torch.bfloat16
    assert product() == torch.float32


def test_what_runs_later_is_not_decorated():
    def numbers():
        yield 1

    async def wait():
        pass

    for function in (numbers, wait):
        with pytest.raises(TypeError, match="runs later"):
            Autocast()(function)


def test_threads_do_not_see_each_others_regions():
    found, barrier = {}, threading.Barrier(3)

    def work(name, region):
        with region:
            barrier.wait()
            found[name] = product()
            barrier.wait()

    regions = {"bf16": Autocast(torch.bfloat16), "fp16": Autocast(torch.float16), "off": Autocast(enabled=False)}
    threads = [threading.Thread(target=work, args=item) for item in regions.items()]
    with Autocast(torch.bfloat16):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}


def test_other_modes_inside_and_outside():
    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    for outer, inner in ((Count(), Autocast(torch.bfloat16)), (Autocast(torch.bfloat16), Count())):
        with outer, inner:
            assert product() == torch.bfloat16
    assert Count.calls >= 2
    with Autocast(torch.bfloat16), torch.device("meta"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_regions_left_in_another_order_than_entered_say_so():
    region, other = Autocast(torch.bfloat16), torch.device("cpu")
    region.__enter__()
    other.__enter__()
    with pytest.raises(RuntimeError, match="still on"):
        region.__exit__(None, None, None)
    other.__exit__(None, None, None)
    torch._C._pop_torch_function_stack()


def attributes():
    places = [torch, torch.Tensor, F, torch.functional, torch._tensor, torch._C._nn, torch.utils.checkpoint, nn.Module]
    return {(place.__name__, name): id(vars(place)[name]) for place in places for name in list(vars(place))}


def test_nothing_of_torch_is_changed_inside_or_after():
    with Autocast(torch.bfloat16):
        product()  # what torch itself sets up on first use
    before = attributes()
    with Autocast(torch.bfloat16):
        nn.MultiheadAttention(4, 2)(X, X, X)
        inside = attributes()
    assert before == inside == attributes()
    assert not torch.is_autocast_enabled("cpu")


def test_fp64_integers_and_complex_numbers_are_left_alone():
    for dtype in (torch.float64, torch.int64, torch.complex64):
        x = X.to(dtype)
        with Autocast(torch.bfloat16):
            assert (x @ x).dtype == dtype
            assert torch.einsum("ij,jk->ik", x, x).dtype == dtype
            assert torch.cat([x, x]).dtype == dtype


def test_in_place_and_out_are_left_alone():
    y, out = X.clone(), torch.empty(4, 4)
    with Autocast(torch.bfloat16):
        assert y.addmm_(X, X).dtype == torch.float32
        assert torch.mm(X, X, out=out).dtype == torch.float32
        assert torch.matmul(X, X, out=out) is out
        with pytest.raises(RuntimeError):
            y.addmm_(X, X.bfloat16())


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="dtype"):
        Autocast(torch.float32)
    for device_type in ("cuda:0", "gpu", torch.device("cuda")):
        with pytest.raises(ValueError, match="device_type"):
            Autocast(device_type=device_type)


def test_the_type_can_be_asked_for():
    assert autocast_dtype(X) is None
    with Autocast(torch.bfloat16, device_type="cpu"):
        assert autocast_dtype(X) == torch.bfloat16
        assert autocast_dtype(X.double()) is None
        with Autocast(torch.float16, device_type="cuda"):
            assert autocast_dtype(X) is None
        with Autocast(enabled=False):
            assert autocast_dtype(X) is None
        with without_autocast(X):
            assert (X @ X).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.float16):
        assert autocast_dtype(X) == torch.float16
        assert autocast_dtype(X.double()) is None
        with without_autocast(X):
            assert (X @ X).dtype == torch.float32


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_torch_compile_is_refused_in_words(where, fullgraph):
    torch._dynamo.reset()
    layer = nn.Linear(4, 4)

    def inside(x):
        with Autocast(torch.bfloat16):
            return layer(x)

    compiled = torch.compile(inside if where == "inside" else layer, backend="eager", fullgraph=fullgraph)
    for _ in range(2):  # it must not fall back to eager the second time
        with pytest.raises(RuntimeError, match=r"Use torch\.autocast"):
            if where == "inside":
                compiled(X)
            else:
                with Autocast(torch.bfloat16):
                    compiled(X)
    assert torch._C._len_torch_function_stack() == 0
    assert product() == torch.float32
    torch._dynamo.reset()


def test_a_call_that_is_left_alone_costs_microseconds():
    def seconds(calls=3000):
        began = time.thread_time()
        for _ in range(calls):
            X.relu()
        return (time.thread_time() - began) / calls

    seconds()
    plain = min(seconds() for _ in range(3))
    with Autocast(torch.bfloat16):
        ours = min(seconds() for _ in range(3))
    assert ours - plain < 20e-6


class Casts(TorchDispatchMode):
    """Counts the casts."""

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_a_weight_is_cast_once_in_the_outermost_region_and_dropped_after():
    layer = nn.Linear(4, 4, bias=False)
    x = X.bfloat16()
    with Casts() as casts:
        with Autocast(torch.bfloat16):
            layer(x), layer(x)
            with Autocast(torch.bfloat16):
                layer(x)
            with Autocast(enabled=False), Autocast(torch.bfloat16):
                layer(x)
            assert casts.count == 1
            with Autocast(torch.float16):
                layer(x), layer(x)
        assert casts.count == 2 + 2  # the weight again, and x twice
    with Casts() as casts, Autocast(torch.bfloat16):
        layer(x)
        assert casts.count == 1


def test_what_is_no_leaf_weight_is_not_kept():
    layer = nn.Linear(4, 4, bias=False)
    x = X.bfloat16()
    with Casts() as casts, Autocast(torch.bfloat16):
        for weight in (layer.weight.detach(), layer.weight * 1, layer.weight.view(4, 4)):
            F.linear(x, weight), F.linear(x, weight)
    assert casts.count == 6
    with Casts() as casts, Autocast(torch.bfloat16, cache_enabled=False):
        layer(x), layer(x)
    assert casts.count == 2


def test_a_weight_that_changes_in_a_region_is_cast_again():
    layer = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)
    with Autocast(torch.bfloat16):
        before = layer(X)
        before.sum().backward()
        optimizer.step()
        assert not torch.equal(layer(X), before)
        torch.testing.assert_close(layer(X), X.bfloat16() @ layer.weight.bfloat16().T)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_weight_first_used_without_gradients_gets_its_gradient(without):
    layer = nn.Linear(4, 4)
    with Autocast(torch.bfloat16):
        with without():
            layer(X)
        layer(X).sum().backward()
    assert layer.weight.grad is not None and layer.bias.grad is not None


def test_casts_are_freed_with_the_region():
    layer = nn.Linear(4, 4, bias=False)
    with Autocast(torch.bfloat16):
        layer(X)
        mode = torch.overrides._get_current_function_mode()
        assert len(mode.casts) == 1
    assert not mode.casts_of
