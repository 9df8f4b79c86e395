"""The memory of other people's models, against measured peaks."""

import json

import pytest
import torch

from helpers.fit import Plan, fit
from helpers.fit.anybody import builder, count_model, trainer
from helpers.fit.plan import peak
from helpers.lab import peak_memory
from helpers.lab.memory import GIB

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
T5 = {"d_model": 128, "d_ff": 512, "num_layers": 2, "num_heads": 4, "d_kv": 32, "vocab_size": 4096}
WHISPER = {"d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 4096}
WHISPER |= {"decoder_attention_heads": 4, "max_source_positions": 200, "pad_token_id": 0, "decoder_start_token_id": 1}
MODELS = {
    "BertForMaskedLM": SMALL | {"vocab_size": 4096},
    "LlamaForCausalLM": SMALL | {"num_key_value_heads": 2, "vocab_size": 4096},
    "ViTForImageClassification": SMALL | {"image_size": 96, "patch_size": 8},
    "T5ForConditionalGeneration": T5,
    "WhisperForConditionalGeneration": WHISPER,
    "ResNetForImageClassification": {"embedding_size": 32, "hidden_sizes": [64, 128], "depths": [2, 2]},
}
CASES = [
    ("BertForMaskedLM", "fp32", "full"),
    ("LlamaForCausalLM", "fp32", "none"),
    ("LlamaForCausalLM", "bf16", "full"),
    ("ViTForImageClassification", "bf16", "none"),
    ("T5ForConditionalGeneration", "fp32", "full"),
    ("WhisperForConditionalGeneration", "fp32", "none"),
    ("ResNetForImageClassification", "fp32", "none"),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "precision", "checkpointing"), CASES)
def test_a_step_needs_what_is_counted(name, precision, checkpointing, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODELS[name] | {"architectures": [name]}))
    counted = count_model(str(config), 4, 128, precision, checkpointing)
    torch.manual_seed(0)
    _, step = trainer(*builder(str(config))(4, 128), precision, checkpointing)
    step()
    measured = peak_memory(step).peak_bytes
    assert counted.bytes - counted.at_rest == pytest.approx(measured, rel=0.12)


def test_a_module_of_a_function_fits_and_has_no_checkpointing_to_switch_on():
    plan = Plan(model=f"{__name__}:linear", batch=4)
    needed = peak(plan).bytes
    row = fit(plan, 2 * needed / GIB)
    assert row["fits"] and row["largest_batch"] > 4
    assert [switch["change"] for switch in row["switches"]] == [{"precision": "bf16"}]
    assert not fit(plan, needed / 2 / GIB)["fits"]


def linear(batch):
    return torch.nn.Linear(256, 256), (torch.zeros(batch, 256),)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:build", "No module named"),
        ("torch.nn:Linear", "missing 1 required positional argument"),
        ("AbsentForCausalLM", "no class of transformers"),
        ("BertForMaskedLM", "batch 2, sequence 600: RuntimeError"),  # has 512 positions
    ],
)
def test_a_model_that_cant_be_made_or_run_is_named_with_its_reason(name, reason):
    with pytest.raises(ValueError, match=reason):
        count_model(name, 2, 600)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": 7, "model_type": []}, "can't do a step"),
        ({"architectures": [["LlamaForCausalLM"]]}, "is no class of transformers"),
        ({"num_key_value_heads": {"": 1}}, "can't do a step"),
        ({"hidden_size": 10**400}, "can't do a step"),
    ],
)
def test_a_configuration_that_is_damaged_is_refused_in_one_line(change, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | change))
    with pytest.raises(ValueError, match=reason) as error:
        count_model(str(tmp_path / "config.json"), 1, 8)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
