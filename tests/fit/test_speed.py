"""The speed of runs on GPUs that aren't there: accuracy on published runs, properties, and the command."""

import json

import numpy as np
import pytest
from calibrated_speed import TAILS, band, fitted, left_out, of_published
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import book
from helpers.cli import main
from helpers.fit import Card, estimate, speed
from helpers.fit.speed import BAND, NAMES, PRECISIONS, THETA, complete, published, seconds
from helpers.lab.cards import LAUNCH_US, card, cards

SMALL = {"gpu": "a100_80gb", "layers": 12, "width": 768, "seq": 1024, "micro_batch": 16}
LARGE = {"gpu": "h100", "count": 8, "layers": 32, "width": 4096, "seq": 4096, "micro_batch": 2}
LARGE |= {"strategy": "FULL_SHARD"}


@pytest.mark.parametrize("by", ["source", "family"])
def test_published_runs_are_predicted_without_their_source_and_without_their_gpus(by):
    errors = np.abs(left_out(by) / np.array([run["tok_s_gpu"] for run in published()]) - 1)
    assert len(errors) == 317
    assert np.median(errors) <= 0.095 and np.quantile(errors, 0.9) <= 0.24


def test_the_band_holds_four_of_five_runs_whose_source_neither_the_fit_nor_the_band_has_seen():
    assert BAND[0] < 0 < BAND[1]
    sources = np.array([run["source"] for run in published()])
    weights = np.array([(sources == source).sum() ** -0.5 for source in sources])  # as in the fit
    ratio = np.log([run["tok_s_gpu"] for run in published()] / left_out())
    shares = []
    for tail in TAILS:
        within = np.zeros(len(ratio), bool)
        for source in set(sources):
            out = sources == source
            low, high = np.quantile(ratio[~out], (tail, 1 - tail), weights=weights[~out], method="inverted_cdf")
            within[out] = (low <= ratio[out]) & (ratio[out] <= high)
        shares.append(weights[within].sum() / weights.sum())
        if shares[-1] >= 0.8:
            break
    assert len(shares) > 1 and shares[-1] < 0.85  # tails of a tenth, as many as it says, held too few
    ends = np.quantile(ratio, (tail, 1 - tail), weights=weights, method="inverted_cdf")
    assert pytest.approx(ends) == BAND and pytest.approx(ends) == band()


def test_the_constants_are_those_that_the_published_runs_give():
    assert fitted(*of_published()) == pytest.approx(THETA)
    assert [run["predicted"] for run in published()] == pytest.approx(left_out())


def test_published_runs_are_predicted_as_well_as_before_by_the_errors_that_the_report_gives():
    sources = [run["source"] for run in published()]
    weights = np.array([sources.count(source) ** -0.5 for source in sources])
    errors = np.abs([run["predicted"] / run["tok_s_gpu"] - 1 for run in published()])
    median, p90 = np.quantile(errors, (0.5, 0.9), weights=weights, method="inverted_cdf")
    assert median <= 0.102 and p90 <= 0.534


def test_parts_add_up_to_the_time_and_a_run_of_the_table_is_completed_as_in_the_table():
    parts = seconds([complete(LARGE)])[0]
    row = speed(LARGE)
    assert sum(row["parts"].values()) == pytest.approx(1)
    assert 1 / row["tokens_per_s_gpu"] == pytest.approx(sum(parts.values()))
    assert row["bound"] == max(parts, key=parts.get)
    for run in published():  # whose products are those that their source's shapes give
        names = {name: run[name] for name in NAMES if name != "linear_params"}
        assert complete(names)["linear_params"] == pytest.approx(run["linear_params"], rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(cards())),
    st.sampled_from(["DDP", "FULL_SHARD", "SHARD_GRAD_OP"]),
    st.sampled_from([SMALL, LARGE]),
    st.integers(0, 9),
    st.booleans(),
)
def test_more_gpus_of_the_same_strategy_never_raise_the_speed_of_each(gpu, strategy, model, doublings, fixed):
    run = model | {"gpu": gpu, "strategy": strategy} | ({"global_batch_seqs": 1024} if fixed else {})
    fewer, more = (speed(run | {"count": n})["tokens_per_s_gpu"] for n in (2**doublings, 2 ** (doublings + 1)))
    assert more <= fewer * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.floats(10, 3000), st.floats(100, 9000), st.floats(1, 4), st.floats(1, 4), st.sampled_from([SMALL, LARGE]))
def test_a_slower_card_is_slower(peak, bandwidth, less_peak, less_bandwidth, model):
    def rate(peak, bandwidth):
        return speed(model, Card(gpu="x", bf16_tflops=peak, gb_per_s=bandwidth))["tokens_per_s_gpu"]

    assert rate(peak / less_peak, bandwidth / less_bandwidth) <= rate(peak, bandwidth) * (1 + 1e-9)


def test_recomputation_and_longer_sequences_cost_time():
    now = speed(LARGE)["tokens_per_s_gpu"]
    assert speed(LARGE | {"act_ckpt": True})["tokens_per_s_gpu"] < now
    assert speed(LARGE | {"seq": 16384, "micro_batch": 1})["tokens_per_s_gpu"] < now
    assert speed(LARGE | {"precision": "fp32"})["tokens_per_s_gpu"] < 0.5 * now


def test_a_card_without_runs_has_a_wider_band_and_says_so():
    known, unknown = speed(SMALL), speed(SMALL | {"gpu": "T4"})
    assert unknown["high"] / unknown["low"] > known["high"] / known["low"]
    assert not known["notes"] and "no published run" in unknown["notes"][0]
    assert ["no bf16 units" in note for note in unknown["notes"]] == [False, True]
    short = speed(SMALL | {"gpu": "h100", "seq": 64, "micro_batch": 1})
    assert short["bound"] == "launches" and any("launched" in note for note in short["notes"])


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "h100", "H100 SXM", "h100_80gb"])
def test_a_card_has_many_names(name):
    assert card(name).gpu == "h100_80gb"


def test_every_card_has_its_source_and_sane_rates():
    assert {"t4", "a10", "l4", "l40s", "rtx3090", "rtx5090", "h100_pcie", "mi300x"} <= set(cards())
    for known in cards().values():
        assert known.source and known.processors and known.ghz and known.memory_gib
        assert known.sustained("fp32") < known.sustained("bf16") < known.best("bf16") <= known.bf16_tflops
        if not known.sustained_tf32_tflops:  # which is measured of one
            tf32 = known.sustained("bf16") / 2 if known.bf16_units else known.sustained("fp32")
            assert known.sustained("tf32") == pytest.approx(tf32)
        lanes = 1e3 * known.fp32_tflops / known.processors / known.ghz / 2  # a whitepaper's: 64 or 128 a processor
        assert 60 < lanes < 150, known.gpu


def test_the_h200s_sustained_rates_are_those_that_are_recorded():
    rows, h200 = book.read("nvidia-h200", "swiglu", "ceilings"), card("h200")
    names = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}
    products = rows[(rows["ceiling"] == "matmul") & (rows["size"] == 8192)].set_index("dtype")
    for dtype, name in names.items():
        row = products.loc[dtype]
        assert h200.sustained(name) == pytest.approx(row["tflops"], rel=1e-3)
        fastest = row["tflops"] * row["median_ms"] / row["p20_ms"]
        assert getattr(h200, f"fastest_{name}_tflops") == pytest.approx(fastest, rel=1e-3)
    assert h200.sustained_mhz == products.loc["bfloat16", "clock_mhz"]
    others = rows.set_index("ceiling")
    assert h200.copy_gb_per_s == pytest.approx(others.loc["copy", "gb_per_s"], rel=1e-3)
    assert pytest.approx(1e3 * others.loc["launch", "median_ms"], rel=1e-3) == LAUNCH_US
    same = card("h100").sustained("bf16") / card("h100").best("bf16")  # nobody measured an H100's here
    assert same == pytest.approx(h200.sustained("bf16") / h200.best("bf16"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "a1000"}, "nearest: a10"),
        ({"gpu": None}, "gpu is missing; known: t4"),
        ({"count": 0}, "count is 0; it must be a number above 0"),
        ({"seq": "long"}, "seq is 'long'"),
        ({"layers": None}, "the model is missing"),
        ({"layer": 12}, "did you mean 'layers'"),
        ({"precision": "int4"}, "valid: bf16, fp16"),
        ({"precision": "fp8"}, "which a100_80gb has no units for"),
        ({"strategy": "magic"}, "valid: none, DDP"),
        ({"count": 6, "tp": 4}, "a multiple of tp"),
    ],
)
def test_a_wrong_run_is_one_line(change, message):
    with pytest.raises(ValueError, match=message) as raised:
        speed(SMALL | change)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_names_may_be_missing_and_texts(precision):
    row = speed({"gpu": "h100", "params": "1.2e9", "precision": precision, "vocab": "", "act_ckpt": "False"})
    assert row["low"] < row["tokens_per_s_gpu"] < row["high"]
    assert row["run"]["width"] % 64 == 0 and not row["run"]["act_ckpt"]


def test_what_shortens_a_run_does_and_the_cost_follows_the_speed():
    run = LARGE | {"act_ckpt": True}
    row = estimate(run, price=3.6)
    assert row["shorter"]["recomputation off"] == pytest.approx(
        speed(run | {"act_ckpt": False})["tokens_per_s_gpu"] / row["tokens_per_s_gpu"]
    )
    assert row["cost_of_1e9_tokens"] == pytest.approx(1e6 / row["tokens_per_s_gpu"])
    assert row["nearest"][0]["gpu"] == "h100_80gb" and row["nearest"][0]["link"].startswith("https://")


@pytest.mark.long
def test_the_command_predicts_a_preset_and_a_configuration(tmp_path, capsys):
    command = ["fit", "--model", "tiny", "--sequence", "64", "--strategy", "zero3", "--ranks", "4"]
    assert main([*command, "--gpu", "rtx4090", "--price", "0.4"]) == 0
    message = capsys.readouterr().out
    assert "tokens/s a GPU" in message and "fits in 24.0 GiB" in message and "10⁹ tokens" in message
    assert max(map(len, (line for line in message.splitlines() if "https://" not in line))) <= 100

    config = tmp_path / "config.json"
    config.write_text(json.dumps({"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_inner": None}))
    command = ["fit", "--model", str(config), "--sequence", "1024", "--json"]
    assert main([*command, "--gpu", "a100"]) == 0
    out, err = capsys.readouterr()
    row = json.loads(out)["speed"]
    assert row["run"]["params"] == pytest.approx(124e6, rel=0.01)
    assert "names no model" in err and err.count("\n") == 1  # its memory isn't known
    assert main([*command, "--peak-tflops", "312", "--bandwidth", "2039"]) == 0
    flags = json.loads(capsys.readouterr().out)["speed"]
    assert flags["tokens_per_s_gpu"] == pytest.approx(row["tokens_per_s_gpu"], rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "h1000"], "nearest: h100"),
        (["--peak-tflops", "100"], "both --peak-tflops and --bandwidth"),
        (["--gpu", "t4", "--price", "-1"], "'-1' is not a number above 0"),
        (["--strategy", "zero9", "--gpu", "t4"], "valid: 'single', 'ddp', 'zero2', 'zero3'"),
        (["--model", "absent.json"], "absent.json can't be read"),
        (["--model", "AbsentForCausalLM"], "is no class of transformers"),
        (["--gpu", "t4", "--ranks", "0"], "not a whole number above 0"),
    ],
)
def test_a_wrong_command_is_one_line(arguments, said, capsys):
    try:
        code = main(["fit", "--model", "tiny", "--sequence", "64", *arguments])
    except SystemExit as exit:
        code = exit.code
    error = capsys.readouterr().err
    assert code == 2 and said in error and error.count("\n") == 1
