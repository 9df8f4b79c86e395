"""replace_in: MLPs run as the layer where they are, if that is exactly what they compute."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.lab import saved_bytes
from helpers.swiglu import MemoryOptimizedSwigluMLP

replace_in = MemoryOptimizedSwigluMLP.replace_in


class Mlp(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(8, 24, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(24, 8, bias=bias)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_state):
        return self.down_proj(F.silu(self.gate_proj(hidden_state)) * self.up_proj(hidden_state))


def changed_in_place(mlp, x):
    up = mlp.up_proj(x)
    up.clamp_(-50.0, 50.0)
    return mlp.down_proj(F.silu(mlp.gate_proj(x)) * up)


OTHERS = {
    "clamped": lambda mlp, x: mlp.down_proj(F.silu(mlp.gate_proj(x).clamp(max=50.0)) * mlp.up_proj(x)),
    "clamped in place": changed_in_place,
    "clamped in training": lambda mlp, x: Mlp.forward(mlp, x).clamp(-1.0, 1.0) if mlp.training else Mlp.forward(mlp, x),
    "divided if large": lambda mlp, x: Mlp.forward(mlp, x / 2 if x.abs().max() > 50 else x),
    "with dropout": lambda mlp, x: mlp.dropout(Mlp.forward(mlp, x)),
    "with functional dropout": lambda mlp, x: F.dropout(Mlp.forward(mlp, x), 0.1, mlp.training),
    "with a second result": lambda mlp, x: (Mlp.forward(mlp, x), None),
}


def other(name):
    return Mlp(bias=True) if name == "with biases" else type("Other", (Mlp,), {"forward": OTHERS[name]})()


def stack(count=2):
    return nn.Sequential(*(Mlp() for _ in range(count)))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", [*OTHERS, "with biases"])
def test_an_mlp_that_may_compute_something_else_stays(name, training):
    model = nn.Sequential(other(name)).train(training)
    with pytest.raises(ValueError, match=r"Sequential has no MLP that computes down_proj.*; \w+ (computes|can't|has)"):
        replace_in(model)
    assert all(module.training == training for module in model.modules())
    mixed = nn.Sequential(Mlp(), model[0])
    with pytest.warns(UserWarning, match="left as they are"):
        assert replace_in(mixed) == 1
    assert not isinstance(mixed[1], MemoryOptimizedSwigluMLP)


def test_parameters_are_the_mlps_own_and_an_optimizer_built_before_trains_them():
    model = stack().eval()
    before, x = copy.deepcopy(model), torch.randn(5, 8)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, before)]
    parameters = dict(model.named_parameters())
    assert replace_in(model, 1) == 2
    assert dict(model.named_parameters()) == parameters
    assert not any(module.training for module in model.modules())
    for each, optimizer in zip((model, before), optimizers, strict=True):
        each(x).square().sum().backward()
        assert all(p.grad.stride() == p.stride() for p in each.parameters())
        optimizer.step()
    for ours, theirs in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("level", range(3))
def test_a_replaced_mlp_saves_what_its_level_says(level):
    model, x = Mlp(), torch.randn(5, 8, requires_grad=True)
    replace_in(model, level)
    assert saved_bytes(lambda: model(hidden_state=x), without=model.parameters()) == 5 * (8 + (3, 0, 2)[level] * 24) * 4
    assert replace_in(model, 3) == 1  # called again, it changes the level
    assert model.checkpoint_level == 3


def test_hooks_of_an_mlp_stay_and_hooks_inside_one_are_refused():
    model, calls = stack(), []
    model[0].register_forward_pre_hook(lambda module, args: calls.append("before"))
    handle = model[0].register_forward_hook(lambda module, args, y: 2 * y)
    model[1].up_proj.register_forward_hook(lambda *_: calls.append("inside"))
    x = torch.randn(5, 8)
    expected = model(x)
    with pytest.warns(UserWarning, match="left as they are: Mlp has hooks inside"):
        assert replace_in(model) == 1
    assert torch.equal(model(x), expected)
    assert calls == ["before", "inside"] * 2
    handle.remove()
    assert not torch.equal(model(x), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_linears_that_change_later_are_called(compiled):
    model, x = stack(), torch.randn(5, 8)
    replace_in(model)
    model[0].up_proj.register_forward_hook(lambda module, args, y: 2 * y)
    model[1].gate_proj = nn.Sequential(model[1].gate_proj, nn.Tanh())
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with pytest.warns(UserWarning, match="Mlp has Linears that were changed or have hooks: it runs its own forward"):
        y = run(x)
    for mlp in model:
        mlp.__class__ = Mlp
    torch.testing.assert_close(y, model(x))


def test_a_model_without_data_can_be_replaced_and_filled_later():
    with torch.device("meta"):
        model = stack()
    assert replace_in(model) == 2
    filled, x = stack(), torch.randn(5, 8)
    model.load_state_dict(filled.state_dict(), assign=True)
    torch.testing.assert_close(model(x), filled(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_replaced_too(duplicate):
    model, x = stack(), torch.randn(5, 8)
    replace_in(model, 1)
    assert [mlp.checkpoint_level for mlp in duplicate(model)] == [1, 1]
    assert torch.equal(duplicate(model)(x), model(x))


SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def transformer(family):
    transformers = pytest.importorskip("transformers")
    config = type(transformers.AutoConfig.for_model(family))(**SIZES)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def loss_and_gradients(model):
    tokens = torch.arange(20).reshape(2, 10)
    model.zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("family", ["mistral", "qwen3", "glm4_moe"])
def test_families_that_compute_it_are_replaced(family):
    model = transformer(family)
    expected = loss_and_gradients(model)
    state = torch.get_rng_state()
    assert replace_in(model) == 2
    assert torch.equal(torch.get_rng_state(), state)
    for ours, theirs in zip(loss_and_gradients(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("family", "computes"),
    [
        ("gemma", r"down_proj\(gelu\(gate_proj\(x\)\) \* up_proj\(x\)\)"),
        ("deepseek_v4", r"down_proj\(clamp\(up_proj\(x\)\) \* silu\(clamp\(gate_proj\(x\)\)\)\)"),
        ("seed_oss", r"dropout\(down_proj\("),
        ("glm4", "no MLP"),
    ],
)
def test_families_that_compute_something_else_say_what(family, computes):
    with pytest.raises(ValueError, match=computes):
        replace_in(transformer(family))


def test_what_is_saved_of_a_replaced_model_loads_anywhere(tmp_path):
    model = transformer("llama")
    replace_in(model)
    expected = loss_and_gradients(model)[0]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(loss_and_gradients(loaded)[0], expected)
    other = transformer("llama")
    replace_in(other)
    other.load_state_dict(loaded.state_dict())
    assert torch.equal(loss_and_gradients(other)[0], expected)


def test_under_gradient_checkpointing_and_compiled_it_is_the_same():
    model, x = stack(), torch.randn(5, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    replace_in(model)
    torch.compiler.reset()  # other tests have compiled the same forward as often as is allowed
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for run in (lambda x: checkpoint(model, x, use_reentrant=False), compiled):
        for ours, theirs in zip(torch.autograd.grad(run(x).sum(), [x, *model.parameters()]), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:LlamaMLP has Linears that were changed")
def test_lora_on_the_mlps_projections_works():
    peft = pytest.importorskip("peft")
    results = []
    for replaced in (False, True):
        model = transformer("llama")
        assert not replaced or replace_in(model) == 2
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
        assert sum("mlp" in name for name, _ in model.named_parameters()) == 2 * 3 * 3
        results.append(loss_and_gradients(model))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert isinstance(model.merge_and_unload().model.layers[0].mlp, MemoryOptimizedSwigluMLP)
