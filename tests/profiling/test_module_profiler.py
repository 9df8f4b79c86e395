import pytest
import torch
from profiling_cases import Spender, VirtualClock, plan, spend, spend_in_backward
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.lab import saved_bytes
from helpers.lab.memory import MIB
from helpers.profiling import module_profiler
from helpers.profiling.module_profiler import ModuleProfiler

ONE = plan(0, 0, 1)
X = torch.ones(4)


def profiled(model, step, schedule=ONE, steps=1):
    """The table of a profile, by module."""
    with ModuleProfiler(model, schedule=schedule) as profiler:
        for _ in range(steps):
            step()
            profiler.step()
    return profiler.summary().set_index("module")


def train(model, x=X):
    return lambda: model(x).sum().backward()


@pytest.fixture(autouse=True)
def _time_stands_still_unless_spent(monkeypatch):
    monkeypatch.setattr(module_profiler, "clock", VirtualClock)


def calling(forward, **children):
    """A module of these children, which calls them as this function of itself and the inputs does."""
    model = nn.Module()
    for name, child in children.items():
        model.add_module(name, child)
    model.forward = lambda *inputs: forward(model, *inputs)
    return model


def forked():
    """Branches that join: gradients flow around the modules as well as through them."""

    def forward(model, x):
        left = model.left(x)
        spend(2)
        return spend_in_backward(model.last(left + model.right(x)), 3) + left

    return calling(forward, left=Spender(10, 20), right=Spender(15, 5), last=Spender(5, 10))


def test_forward_and_backward_take_the_time_that_each_module_takes():
    model = forked()
    table = profiled(model, train(model))
    for path, forward, backward in (("left", 10, 20), ("right", 15, 5), ("last", 5, 10)):
        row = table.loc[f"model.{path}"]
        assert (row.type, row.calls, row.forward_ms, row.backward_ms) == ("Spender", 1, forward, backward)
        assert row.self_ms == row.total_ms == forward + backward
    row = table.loc["model"]
    assert (row.type, row.forward_ms, row.backward_ms, row.self_ms) == ("Module", 32, 38, 5)


def test_own_times_and_what_is_outside_add_up_to_the_step():
    model = forked()

    def step():
        spend(10)  # a slow loader
        spend_in_backward(model(X), 7).sum().backward()  # a slow loss
        spend(13)  # a slow optimizer

    table = profiled(model, step, plan(1, 1, 3), 5)
    assert table.total_ms["step"] == table.self_ms["step"] == 100
    assert table.total_ms["outside"] == table.self_ms["outside"] == 30
    assert table.loc["outside", ["calls", "forward_ms", "backward_ms"]].isna().all()
    assert table.total_ms["model"] == 70
    assert table.self_ms.drop("step").sum() == pytest.approx(100)
    assert table.share[["model", "outside", "step"]].tolist() == [0.7, 0.3, 1]
    assert (table.forward_ms["step"], table.backward_ms["step"]) == (32, 38)


def test_a_few_odd_steps_do_not_count_and_the_rest_still_adds_up():
    model, durations = nn.Sequential(Spender(1, 1)), iter([5, 6, 7, 8, 9, 10, 11, 12, 1000, 2000])

    def step():
        spend(next(durations))
        train(model)()

    table = profiled(model, step, plan(0, 0, 10), 10)
    assert table.total_ms["step"] == pytest.approx(2 + sum([7, 8, 9, 10, 11, 12]) / 6)
    assert table.self_ms.drop("step").sum() == pytest.approx(table.total_ms["step"])
    assert (table.attrs["steps"], table.attrs["median_ms"], table.attrs["device"]) == (10, 11.5, "cpu")


def test_a_module_called_twice_counts_twice_and_may_call_another_in_between():
    shared, other = Spender(10, 5), Spender(5, 15)
    model = nn.Sequential(shared, other, shared)
    table = profiled(model, train(model))
    assert list(table.index) == ["model", "model.0", "model.1", "outside", "step"]
    assert (table.calls["model.0"], table.calls["model.1"]) == (2, 1)
    assert (table.forward_ms["model.0"], table.backward_ms["model.0"], table.backward_ms["model.1"]) == (20, 10, 15)


def test_a_module_that_calls_itself_is_not_counted_twice():
    model = calling(lambda m, x, depth=2: m(x, depth - 1) if depth else m.inner(x), inner=Spender(5, 5))
    table = profiled(model, train(model))
    assert (table.calls["model"], table.forward_ms["model"], table.backward_ms["model"]) == (3, 5, 5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_is_backward(reentrant):
    block = nn.Sequential(Spender(10, 5), Spender(5, 10))
    model = calling(lambda m, x: checkpoint(m.block, x, use_reentrant=reentrant), block=block)
    table = profiled(model, lambda: model(X.clone().requires_grad_()).sum().backward())
    assert table.calls.drop(["outside", "step"]).tolist() == [1, 1, 1, 1]
    for path, forward, backward in (("block.0", 10, 5), ("block.1", 5, 10), ("block", 15, 15)):
        row = table.loc[f"model.{path}"]
        assert (row.forward_ms, row.backward_ms) == (forward, backward + forward)
    assert table.self_ms.drop("step").sum() == pytest.approx(table.self_ms["step"])


def test_backward_within_forward_is_backward_time():
    def forward(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model.inner(x).sum(), x)
        return model.inner(x) + slope

    model = calling(forward, inner=Spender(5, 10))
    table = profiled(model, train(model))
    assert (table.forward_ms["model.inner"], table.backward_ms["model.inner"]) == (10, 20)
    assert table.self_ms["model"] == 0


@pytest.mark.parametrize(
    ("wrap", "parts"),
    [
        (lambda a, b: (a, b), lambda out: out),
        (lambda a, b: {"a": a, "b": [b, None]}, lambda out: (out["a"], out["b"][0])),
    ],
)
def test_outputs_may_be_tuples_and_mappings(wrap, parts):
    model = calling(lambda m, x: wrap(m.one(x), m.two(x)), one=Spender(0, 10), two=Spender(0, 5))

    def step():
        one, two = parts(model(X))
        (one + two).sum().backward()

    table = profiled(model, step)
    assert table.backward_ms[["model.one", "model.two"]].tolist() == [10, 5]


def test_only_the_part_of_the_graph_that_runs_is_timed():
    model = nn.Sequential(Spender(0, 5), Spender(0, 10), Spender(0, 15))
    outputs = []
    model[1].register_forward_hook(lambda module, args, output: outputs.append(output))

    def step():
        model(X)
        torch.autograd.grad(outputs.pop().sum(), model[0].weight)

    table = profiled(model, step)
    assert table.backward_ms[["model.0", "model.1", "model.2"]].tolist() == [5, 10, 0]


def test_frozen_modules_and_evaluation_have_no_backward():
    model = nn.Sequential(Spender(5, 10), Spender(5, 10))
    model[0].requires_grad_(False)
    table = profiled(model, train(model))
    assert (table.backward_ms["model.0"], table.backward_ms["model.1"]) == (0, 10)
    with torch.no_grad():
        table = profiled(model, lambda: model(X))
    assert table.backward_ms["step"] == 0
    assert table.forward_ms["step"] == 10


def faulty():
    def forward(model, x):
        x = model.first(x)
        if model.fails:
            raise ArithmeticError("as asked")
        return model.second(x)

    model = calling(forward, first=Spender(5, 5), second=Spender(5, 5))
    model.fails = False
    return model


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_a_step_is_the_users_and_spoils_nothing(where):
    model = faulty()

    def fail():
        model.fails = where == "forward"
        y = model(X)
        if where == "backward":
            model.first.weight.register_hook(lambda gradient: 1 / 0)
        y.sum().backward()

    def step():
        with pytest.raises(ArithmeticError):
            fail()
        model.fails = False
        model.first.weight._backward_hooks = None
        model(X).sum().backward()

    table = profiled(model, step)
    assert table.calls["model"] == table.calls["model.first"] == 2
    assert table.calls["model.second"] == (1 if where == "forward" else 2)
    assert table.forward_ms["model.first"] == 10
    assert table.backward_ms["model.second"] == 5 if where == "forward" else 10
    assert table.self_ms.drop("step").sum() == pytest.approx(table.self_ms["step"])


def test_everything_is_removed_on_leaving_and_after_an_exception():
    model = forked()
    with pytest.raises(ArithmeticError), ModuleProfiler(model, schedule=plan(0, 0, 5)) as profiler:
        total = model(X).sum()
        profiler.step()
        raise ArithmeticError
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called
    before = len(profiler._steps[0].marks)
    total.backward()  # its nodes still have hooks, which do nothing
    assert len(profiler._steps[0].marks) == before
    assert profiler.summary().attrs["steps"] == 1


def mlp():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Dropout(0.5, inplace=True))


def attention():
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


@pytest.mark.parametrize(
    ("build", "autocast"),
    [(mlp, False), (attention, True), (lambda: nn.GRU(8, 8), False), (lambda: nn.Bilinear(8, 8, 8), True)],
)
def test_numbers_do_not_change_by_a_bit(build, autocast):
    model, x = build(), torch.randn(3, 5, 8)
    arguments = (x, x) if isinstance(model, nn.Bilinear) else (x,)

    def gradients(profiler=None):
        tensors = []
        for _ in range(3):
            torch.manual_seed(0)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = model(*arguments)
            output = output[0] if isinstance(output, tuple) else output
            output.float().square().sum().backward()
            tensors += [output.detach(), *(p.grad for p in model.parameters())]
            model.zero_grad()
            if profiler:
                profiler.step()
        return tensors

    expected = gradients()
    with ModuleProfiler(model, schedule=plan(0, 1, 2)) as profiler:
        tensors = gradients(profiler)
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def test_arguments_and_outputs_stay_the_same_objects():
    seen = []

    def forward(model, query, key):
        seen.append(query is key)
        model.returned = query * model.inner.weight
        return model.returned

    model, x = calling(forward, inner=Spender()), torch.ones(2, requires_grad=True)
    profiled(model, lambda: seen.append(model(x, x) is model.returned))
    assert seen == [True, True]


def test_only_the_steps_of_the_schedule_are_recorded_and_others_have_no_hooks():
    model = nn.Sequential(nn.Linear(2, 2))
    hooks = []
    with ModuleProfiler(model, schedule=plan(1, 1, 2)) as profiler:
        for _ in range(6):
            hooks.append(len(model[0]._forward_hooks))
            train(model, torch.ones(2))()
            profiler.step()
    assert hooks == [0, 1, 1, 1, 0, 0]
    assert profiler.summary().attrs["steps"] == 2


def test_activations_are_what_autograd_keeps():
    model, x = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128)), torch.randn(1024, 256)
    table = profiled(model, train(model, x), plan(0, 1, 1), 2)
    assert table.activation_mib["model.0"] == 1024 * 256 * 4 / MIB  # x
    assert table.activation_mib["model.1"] == 1024 * 512 * 4 / MIB  # its output, which the next layer keeps as well
    assert table.activation_mib["model.2"] == 0
    of_all = saved_bytes(lambda: model(x), without=model.parameters())
    assert table.activation_mib["model"] == table.activation_mib["step"] == of_all / MIB


def test_without_a_warm_up_step_memory_is_not_known():
    model = mlp()
    table = profiled(model, train(model, torch.ones(2, 8)), plan(0, 0, 1))
    assert table[["activation_mib", "peak_mib"]].isna().all().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((lambda x: x,), "model is a function; it must be a torch.nn.Module"),
        ((nn.ReLU(),), "'model' has no parameters"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message), ModuleProfiler(*arguments):
        pass


def test_a_compiled_model_is_refused_in_one_line():
    model = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"'model.1' is compiled, .* profile the model before torch.compile"):
        ModuleProfiler(model)
    model.compile()
    with pytest.raises(ValueError, match="'model' is compiled"):
        ModuleProfiler(model)


def test_a_profile_of_nothing_says_what_to_do():
    model, x = nn.Linear(2, 2), torch.ones(2)
    with pytest.raises(RuntimeError, match=r"in a recorded step of 2: run more steps \(three by the default"):
        profiled(model, lambda: model(x), module_profiler.DEFAULT_SCHEDULE, 2)
    with pytest.raises(RuntimeError, match=r"no module of 'model' was called .* call it, not its forward\(\)"):
        profiled(model, lambda: model.forward(x))
    with pytest.raises(RuntimeError, match=r"step\(\) outside of the with block"):
        ModuleProfiler(model).step()


def test_operations_in_place_between_calls_are_the_callers():
    def forward(model, x):
        y = model.first(x)
        y += 1
        return model.second(spend_in_backward(y, 7).relu_())

    model = calling(forward, first=Spender(1, 10), second=Spender(2, 20))
    table = profiled(model, train(model))
    assert table.backward_ms[["model.first", "model.second", "model"]].tolist() == [10, 20, 37]


def test_calls_have_their_names_in_a_trace_of_torchs_profiler():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.profiler.profile() as trace:
        profiled(model, train(model))
    assert {"model", "model.0", "model.1"} <= {event.key for event in trace.key_averages()}


@pytest.mark.parametrize("asked_for", ["everything", "the input's gradient"])
def test_what_feeds_the_model_is_outside(asked_for):
    """Though the first node that the model made, its weight's transposition, doesn't run for the input's gradient."""
    model, x = nn.Sequential(nn.Linear(4, 4), Spender(0, 5)), torch.ones(2, 4, requires_grad=True)

    def step():
        loss = model(spend_in_backward(x, 9)).sum()
        if asked_for == "everything":
            loss.backward()
        else:
            torch.autograd.grad(loss, x)

    table = profiled(model, step)
    assert (table.backward_ms["model.1"], table.backward_ms["model.0"], table.total_ms["outside"]) == (5, 0, 9)


@pytest.mark.parametrize("fed", [False, True])
def test_adding_up_a_parameters_gradient_is_part_of_its_modules_backward(fed):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4, requires_grad=True)
    for layer, ms in zip(model, (3, 4), strict=True):
        layer.weight.register_post_accumulate_grad_hook(lambda parameter, ms=ms: spend(ms))
    table = profiled(model, lambda: model(spend_in_backward(x, 9) if fed else x).sum().backward())
    assert table.backward_ms[["model.0", "model.1"]].tolist() == [3, 4]
    assert table.total_ms["outside"] == (9 if fed else 0)
