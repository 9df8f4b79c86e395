"""The seconds of a token by part: each from the operations and bytes that it stands for, reckoned here by hand."""

import json
from dataclasses import replace

import pytest

from helpers.fit import Plan, estimate, speed
from helpers.fit.plan import changes, config_shape
from helpers.fit.speed import LINK_SHARE, NETWORK_SHARE, complete, seconds, shorter
from helpers.lab.cards import LAUNCH_US, Card, card

H100 = card("h100")
MODEL = {"gpu": "h100", "layers": 10, "width": 1024, "heads": 8, "ffn": 4096, "vocab": 1000, "seq": 2048}
LINEAR = 10 * 12 * 1024**2  # weights of the layers
PARAMS = LINEAR + 1000 * 1024
RUN = MODEL | {"params": PARAMS, "linear_params": LINEAR, "micro_batch": 4}
TOKENS = 4 * 2048
BF16, MEMORY, SPECIAL = 1e12 * H100.sustained("bf16"), 1e9 * H100.gb_per_s, 1e12 * H100.special_tops
LINK, NETWORK = 1e9 * LINK_SHARE * H100.link_gb_per_s, 1e9 * NETWORK_SHARE * H100.network_gb_per_s


def part(name, constants=(0.0, 0.0, 0.0), **change):
    return seconds([complete(RUN | change)], constants)[0][name]


@pytest.mark.parametrize(("again", "passes"), [(False, 3), (True, 4)])
def test_products_are_two_operations_a_weight_and_pass_and_the_heads_are_not_done_again(again, passes):
    expected = (2 * passes * LINEAR + 6 * 1000 * 1024) / BF16
    assert part("products", (1, 0, 0), act_ckpt=again) == pytest.approx(expected)
    halved = (2 * passes * LINEAR / H100.sustained("fp8") / 1e12) + 6 * 1000 * 1024 / BF16
    assert part("products", (1, 0, 0), act_ckpt=again, precision="fp8") == pytest.approx(halved)


@pytest.mark.parametrize(("again", "products", "passes"), [(False, 7, 2), (True, 9, 3)])
def test_attention_multiplies_and_takes_exponentials_of_the_causal_half(again, products, passes):
    scores = 10 * 8 * 2048 / 2  # of a token
    assert part("attention", (1, 0, 0), act_ckpt=again) == pytest.approx(scores * products * 2 * 128 / BF16)
    assert part("attention", (0, 1, 0), act_ckpt=again) == pytest.approx(scores * passes / SPECIAL)


def test_activations_are_moved_a_third_more_often_where_they_are_computed_again():
    logits = part("memory")
    assert logits == pytest.approx(12 * 1000 / MEMORY)
    moved = part("memory", (0, 0, 1)) - logits
    assert moved == pytest.approx(10 * 1024 / MEMORY)  # a value of two bytes for each layer and two constants
    assert part("memory", (0, 0, 1), act_ckpt=True) - logits == pytest.approx(moved * 4 / 3)
    assert part("memory", (0, 0, 1), precision="fp32") - logits == pytest.approx(moved * 2)


@pytest.mark.parametrize(("strategy", "divided"), [("DDP", 1), ("SHARD_GRAD_OP", 8), ("FULL_SHARD", 8)])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_optimizer_takes_its_bytes_once_a_step_and_a_shard_of_them(strategy, divided, accumulate):
    run = {"count": 8, "strategy": strategy, "global_batch_seqs": 4 * 8 * accumulate}
    expected = 26 * PARAMS / divided / MEMORY / (accumulate * TOKENS)
    assert part("optimizer", **run) == pytest.approx(expected)


@pytest.mark.parametrize(("strategy", "rounds", "each"), [("DDP", 2, 3), ("SHARD_GRAD_OP", 2, 3), ("FULL_SHARD", 3, 1)])
@pytest.mark.parametrize(("count", "rate"), [(2, LINK), (8, LINK), (64, min(LINK, 8 * NETWORK))])
def test_weights_of_16_bits_are_exchanged_over_the_slower_link(strategy, rounds, each, count, rate):
    run = {"count": count, "strategy": strategy, "global_batch_seqs": 4 * count * 3}
    expected = rounds * 2 * PARAMS * (count - 1) / count / rate / (each * TOKENS)
    assert part("communication", **run) == pytest.approx(expected)


def test_tensor_parallel_gpus_divide_the_model_and_a_tokens_seconds_are_those_of_all():
    run = {"count": 4, "tp": 4, "strategy": "none"}
    for name in ("products", "optimizer"):
        assert part(name, (1, 0, 0), **run) == pytest.approx(part(name, (1, 0, 0), strategy="none"))
    deeper = run | {"layers": 20}
    assert part("communication", **deeper) == pytest.approx(2 * part("communication", **run)) != 0


@pytest.mark.parametrize("micro_batches", [4, 16])
def test_a_pipelines_bubble_is_its_other_stages_over_its_micro_batches(micro_batches):
    run = {"count": 4, "pp": 4, "strategy": "none", "global_batch_seqs": 4 * micro_batches}
    for name, constants in (("products", (1, 0, 0)), ("attention", (1, 1, 0)), ("memory", (0, 0, 1))):
        assert part(name, constants, **run) == pytest.approx(part(name, constants) * (1 + 3 / micro_batches))


def test_launches_count_where_they_take_longer_than_all_else():
    """51 a layer and micro-batch, which many tokens share."""
    fast = Card(gpu="fast", bf16_tflops=1e9, gb_per_s=1e9)
    row = speed(RUN, fast)
    assert sum(row["parts"].values()) == pytest.approx(1)
    assert 1 / row["tokens_per_s_gpu"] == pytest.approx(10 * 51 * LAUNCH_US * 1e-6 / TOKENS)
    assert part("launches", (1, 1, 100)) == 0


def test_a_steps_tokens_and_operations_follow_from_its_speed():
    row = speed(RUN | {"count": 8, "global_batch_seqs": 64})
    each = row["tokens_per_s_gpu"]
    assert row["tokens_per_s"] == pytest.approx(8 * each)
    assert row["step_ms"] == pytest.approx(1e3 * 64 * 2048 / (8 * each))
    operations = 6 * PARAMS + 12 * 10 * 1024 * 2048
    assert row["mfu"] == pytest.approx(each * operations / (1e12 * H100.bf16_tflops))


def test_a_shape_that_isnt_given_is_usual():
    run = complete({"gpu": "h100", "width": 2048, "params": 1.3e9, "vocab": 50304})
    assert run["layers"] == round(1.3e9 / 12 / 2048**2) and run["heads"] == 16 and run["ffn"] == 4 * 2048
    gated = complete({"gpu": "h100", "layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192 + 1024})
    linear = 16 * (2048**2 * (2 + 2 / 4) + 3 * 2048 * (8192 + 1024))
    assert gated["linear_params"] == pytest.approx(linear) and gated["params"] == pytest.approx(linear + 50304 * 2048)
    untied = complete(MODEL | {"params": PARAMS + 1000 * 1024})  # the input's table has no products
    assert untied["linear_params"] == LINEAR
    odd = complete(MODEL | {"params": 10 * PARAMS})  # no such layers: all but the embedding multiplies
    assert odd["linear_params"] == 10 * PARAMS - 1000 * 1024


def test_doubling_a_micro_batch_raises_a_batch_that_would_be_too_small_for_it():
    few = RUN | {"micro_batch": 1, "seq": 128, "count": 8, "strategy": "FULL_SHARD"}
    gain = shorter(few)["micro-batch doubled"]
    twice = speed(few | {"micro_batch": 2, "global_batch_seqs": 16})["tokens_per_s_gpu"]
    assert gain == pytest.approx(twice / speed(few)["tokens_per_s_gpu"]) and gain > 1.5


def test_an_estimate_has_a_cost_only_at_a_price_and_a_card_given_by_its_rates_no_fp8():
    assert "cost_of_1e9_tokens" not in estimate(RUN)
    with pytest.raises(ValueError, match="x has no units for"):
        speed(RUN | {"precision": "fp8"}, Card(gpu="x", bf16_tflops=100, gb_per_s=1000))


def test_the_language_model_of_a_configuration_of_several_has_the_shape(tmp_path):
    size = {"num_hidden_layers": 12, "hidden_size": 768, "vocab_size": 1000, "num_attention_heads": 12}
    shapes = []
    for number, config in enumerate((size, {"text_config": size, "hidden_size": 64})):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(config))
        shapes.append(config_shape(path))
    assert shapes[0] == shapes[1] and shapes[1]["width"] == 768


@pytest.mark.parametrize(("batch", "ranks"), [(16, [8]), (12, [4]), (6, [2]), (7, [])])
def test_a_plan_is_divided_over_as_many_ranks_as_its_batch_allows(batch, ranks):
    switches = changes(replace(Plan(model="tiny"), batch=batch), 0)
    assert sorted({change["ranks"] for change in switches if "ranks" in change}) == ranks
