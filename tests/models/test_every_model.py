"""What holds for several networks: they learn samples by heart, have their namesake's size, name wrong settings."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from llama_cases import SIZE

from helpers.models import Bert, Llama, ResNet, UNet, ViT
from helpers.models.bert import Classifier


def vit(**changes):
    sizes = {"image_size": 32, "patch_size": 8, "width": 16, "depth": 2, "heads": 2, "head_dim": 8, "mlp_size": 64}
    return ViT(5, **sizes | {"dropout": 0.0} | changes)


def bert(**changes):
    return Bert(11, 8, layers=2, heads=2, feedforward_size=12, max_length=10, **changes)


def each_its_class(model, inputs):
    logits = model(inputs)
    return F.cross_entropy(logits, torch.arange(len(inputs)) % logits.shape[1])


def mask_of_bright_pixels(model, images):
    return F.binary_cross_entropy_with_logits(model(images), (images[:, :1] > 0.5).float())


def images(count=8, side=32):
    return torch.randn(count, 3, side, side)


@pytest.mark.parametrize(
    ("build", "inputs", "loss", "rate"),
    [
        (lambda: Classifier(bert(dropout=0.0), 4), lambda: torch.arange(8)[:, None].expand(8, 4), each_its_class, 1e-2),
        (lambda: ResNet.from_name("tiny"), images, each_its_class, 1e-2),
        (lambda: UNet(width=4, depth=2), lambda: images(2, 16), mask_of_bright_pixels, 2e-2),
    ],
    ids=["bert", "resnet", "unet"],
)
def test_it_learns_a_few_samples_by_heart(build, inputs, loss, rate):
    model, batch = build(), inputs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(40):
        optimizer.zero_grad()
        (last := loss(model, batch)).backward()
        optimizer.step()
    assert last.item() < 0.4


@pytest.mark.parametrize(
    ("build", "parameters"),
    [
        (lambda: Bert.from_name("bert-base"), 109_482_240),
        (lambda: ResNet.from_name("resnet-18"), 11_689_512),
        (lambda: Llama.from_name("llama-3.2-1b"), 1_235_814_400),
        (lambda: Llama.from_name("llama-3.1-8b"), 8_030_261_248),
        (lambda: ViT(20), 10_272_788),
        (UNet, 31_037_633),
    ],
)
def test_it_has_as_many_parameters_as_its_namesake(build, parameters):
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in build().parameters()) == parameters


@pytest.mark.parametrize(("build", "inputs"), [(bert, torch.tensor([[3, 1, 4, 1, 5]])), (vit, images(1))])
def test_dropout_is_off_in_evaluation_only(build, inputs):
    model = build(dropout=0.5)
    assert not torch.equal(*(torch.as_tensor(model(inputs)[0]) for _ in range(2)))
    model.eval()
    assert torch.equal(*(torch.as_tensor(model(inputs)[0]) for _ in range(2)))


TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])


@pytest.mark.parametrize(
    ("model", "inputs"), [(bert(), (TOKENS,)), (ResNet.from_name("tiny"), (images(2),))], ids=["bert", "resnet"]
)
@pytest.mark.parametrize(
    "capture",
    [
        lambda model, inputs: torch.jit.trace(model, inputs),
        lambda model, inputs: torch.jit.script(model),
        lambda model, inputs: torch.export.export(model, inputs).module(),
    ],
    ids=["trace", "script", "export"],
)
def test_it_can_be_captured_and_nothing_warns_of_a_wrong_graph(capture, model, inputs):
    model.eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.testing.assert_close(capture(model, inputs)(*inputs), model(*inputs))
    assert not [each for each in caught if issubclass(each.category, torch.jit.TracerWarning)]


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (ViT, {"patch_size": 30}, "image_size is 224; it must be a multiple of patch_size, 30"),
        (Llama, SIZE | {"kv_heads": 3}, "heads is 4; it must be a multiple of kv_heads, 3"),
        (Llama, SIZE | {"width": 33}, "width is 33; it must be a multiple of heads, 4"),
    ],
)
def test_wrong_settings_are_named(build, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_an_unknown_preset_names_those_there_are():
    with pytest.raises(ValueError, match="unknown model 'huge'; valid: tiny, bytes-1m, "):
        Llama.from_name("huge")
