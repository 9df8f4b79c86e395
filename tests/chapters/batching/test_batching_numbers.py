"""Chapter 2's numbers, from rows made by hand."""

import pandas as pd
import pytest

from helpers.chapters import batching

NONE = pd.DataFrame()
TRAININGS = pd.DataFrame(
    [
        {"data": data, "seed": seed, "validation_loss": loss + 0.1 * seed, "validation_accuracy": 0.3, "steps": 10}
        for data, losses in {"BIG BRAIN": (4.0, 4.0, 4.0), "k = 10": (5.0, 5.1, 4.9), "packed": (3.9, 4.2, 4.0)}.items()
        for seed, loss in enumerate(losses)
    ]
).assign(
    train_s=2.0,
    peak_gib=0.5,
    guess_loss=5.7,
    guess_accuracy=0.1,
    real_tokens=1000,
    width=8,
    layers=2,
    words=50,
    epochs=1,
    batch_size=8,
    max_length=128,
    source="text, part",
)


def test_a_training_is_told_by_its_means_over_the_seeds():
    training = batching.training.of_rows(TRAININGS, NONE, NONE)
    assert f"{training.balanced_gap}" == "1.00 nats (0.75 to 1.25, 3 pairs)"
    assert training.table["peak_mib"].tolist() == [512] * 3
    assert training.table.loc[1, "loss"] == pytest.approx(5.1)


def test_what_was_not_trained_is_not_measured():
    training = batching.training.of_rows(TRAININGS[TRAININGS["data"] != "k = 10"], NONE, NONE)
    assert not training.balanced_gap.measured and not training.balanced_over_longest.measured
    assert not training.each.balanced.measured and not training.each.least_ms.measured


def test_a_trainings_step_stands_beside_its_products():
    packed = {"variant": "packed, varlen", "dtype": "bfloat16"}
    ceilings = pd.DataFrame({"dtype": ["bfloat16", "float32"], "tflops": [1e-6, 1e-7]})
    each = batching.training.of_rows(TRAININGS, ceilings, pd.DataFrame([packed])).each
    assert f"{each.packed}" == "200 ms"
    weights = 12 * 2 * 8**2 + 50 * 8
    assert float(each.least_ms) == pytest.approx(1e3 * 6 * weights * 100 / 1e6)
    assert float(each.share) == pytest.approx(float(each.least_ms) / 200)


def epoch(variant, size, rate, padding):
    times = dict.fromkeys(("min_ms", "mean_ms", "median_ms", "max_ms", "epoch_s", "p25_ms"), 1.0) | {"p75_ms": 1.1}
    row = {"variant": variant, "batch_size": size, "real_tokens_per_s": rate, "padding_share": padding, "batches": 9}
    turns = " ".join(f"{1e6 / rate * turn:.4g}" for turn in (1, 1.01, 1, 0.99))
    return (
        row
        | times
        | {"us_per_token": turns, "loader_s": None, "samples": 24, "width": 8, "dtype": "float32", "source": "text"}
    )


EPOCHS = pd.DataFrame(
    [
        epoch("BRAIN", 4, 100.0, 0.8),
        epoch("k = 10", 4, 600.0, 0.05),
        epoch("packed", 4, 900.0, 0.01),
        epoch("BRAIN", 16, 50.0, 0.75),
        epoch("k = 10", 16, 400.0, 0.06),
    ]
)


def test_gains_are_those_of_the_better_batch_size_and_the_bound_follows_from_padding():
    times = batching.batch_time.of_rows(EPOCHS)
    assert (times.sizes, [len(table) for table in times.tables]) == ([4, 16], [3, 2])
    assert (
        f"{times.balanced}, {times.packed}, {times.bound}"
        == "8.0× (8.0 to 8.0, 4 pairs), 9.0× (9.0 to 9.0, 4 pairs), 5.0×"
    )
    assert (f"{times.brain_padding}", f"{times.balanced_padding}") == ("80%", "6.0%")
    assert times.largest.at_most(float(times.bound)).outcome == "does not hold"
    assert times.big_brain.at_least(1).outcome == "not measured"
    turns = {"BRAIN": "80 80 80 80", "k = 10": "9.9 10 10.1 10"}
    paired = EPOCHS.assign(us_per_token=[turns.get(name) for name in EPOCHS["variant"]])
    assert f"{batching.batch_time.of_rows(paired).balanced}" == "8.0× (7.9 to 8.1, 4 pairs)"


def steps(variants, **columns):
    rows = [{"variant": name, "real_tokens_per_s": rate} for name, rate in variants.items()]
    shape = {
        "layers": 2,
        "width": 8,
        "dtype": "float32",
        "source": "text",
        "batch_size": 4,
        "median_ms": 1.0,
        "p20_ms": 1.0,
    }
    return pd.DataFrame(rows).assign(preset="cpu", **shape, p80_ms=1.0, n=5, **columns)


def test_the_fastest_of_several_variants_is_quoted():
    rates = {"equally long, no padding": 10.0, "BRAIN": 1.0, "packed, dense": 5.0, "packed, varlen": 9.0}
    turns = ["1 1 1 1", "10.1 10 10 9.9", "2 2.02 2 2.02", "1.1 1.1 1.1 1.1"]
    paired = steps(rates, ratio_to_no_padding=[rate / 10 for rate in rates.values()], us_per_token=turns)
    throughput = batching.throughput.of_rows(paired)
    assert (throughput.fastest, f"{throughput.packed:bare}") == ("packed, varlen", "91% (90 to 91)")
    assert f"{throughput.gain}, {throughput.alone}" == "9.1× (9.0 to 9.2, 4 pairs), 5.0× (4.9 to 5.1, 4 pairs)"
    assert not throughput.balanced.measured
    on_gpu = batching.throughput.of_rows(paired.assign(preset="gpu"))  # where padded batches have varlen's kernel
    assert f"{on_gpu.alone}" == f"{on_gpu.gain}" == "9.1× (9.0 to 9.2, 4 pairs)"
    flex = paired.iloc[[3]].assign(variant="packed, flex", us_per_token="1 1 1 1", ratio_to_no_padding=1.0)
    with_flex = pd.concat([paired, flex]).assign(preset="gpu")
    faster = batching.throughput.of_rows(with_flex)
    assert f"{faster.kernel}" == "1.10× (1.09 to 1.11, 4 pairs)"
    assert f"{faster.alone}" == f"{on_gpu.alone}", "the padded batches' kernel"
    assert faster.table["attention"].tolist() == ["causal", "causal", "dense", "varlen", "flex"]
    host = batching.throughput.of_rows(with_flex.assign(device_share=[0.99, 0.99, 0.99, 0.99, 0.7]))
    assert "isn't host-bound" in f"{host.kernel}" and host.alone.measured


def attended(tokens, times_ms, baseline):
    shape = {"heads": 2, "head_dim": 8, "build_ms": 0.1, "peak_gib": 0.1, "p20_ms": 1.0, "p80_ms": 1.0}
    rows = [{"variant": name, "median_ms": ms, "ratio": ms / times_ms[baseline]} for name, ms in times_ms.items()]
    return pd.DataFrame(rows).assign(tokens=tokens, baseline=baseline, baseline_ms=times_ms[baseline], **shape)


def test_attention_within_documents_is_compared_with_the_padded_batch():
    times_ms = {"dense": 100.0, "flex": 1.0, "varlen": 2.0, "causal, leaking": 20.0, "padded, causal": 4.0}
    rows = pd.concat([attended(64, times_ms, "padded, causal"), attended(32, times_ms, "padded, causal")])
    named = batching.attention.of_rows(rows)
    assert (f"{named.within}", named.fastest, named.tokens) == ("4.0× (unpaired)", "flex", 64)
    assert "time, padded, causal = 1" in named.table
    host = batching.attention.of_rows(rows.assign(device_share=[0.99, 0.5, 0.99, 0.99, 0.99] * 2))
    assert (f"{host.within}", host.fastest) == ("2.0× (unpaired)", "varlen")
    host = batching.attention.of_rows(rows.assign(device_share=0.5))
    assert "isn't host-bound" in f"{host.within}" and "device_share" in host.table
    on_cpu = batching.attention.of_rows(attended(64, {"dense": 9.0, "varlen": 3.0}, "dense"))
    assert "padded batch" in f"{on_cpu.within}"


def test_samplers_are_tabled_by_size():
    scaling = pd.DataFrame({"samples": [10**4, 10**6], "variant": "BalancedBatchSampler", "init_s": [0.001, 0.05]})
    scaling = batching.sampler_scaling.of_rows(scaling.assign(first_batch_ms=1.0, batch_us=[5.0, 4.0]))
    assert scaling.table["init, ms: ours"].tolist() == [1, 50]
    assert f"{scaling.growth}" == "0.80× (unpaired)"
    padded = pd.DataFrame(
        {"samples": 100, "batch_size": [4, 8], "variant": "BRAIN", "candidate_share": 1.0, "fill": 1.0}
    )
    table = batching.padding.of_rows(padded.assign(padding_share=[0.8, 0.9])).table
    assert table.loc[0, ["padding, batches of 4, %", "padding, batches of 8, %"]].tolist() == ["80.0", "90.0"]
