"""Chapter 4's numbers, from rows made by hand."""

import numpy as np
import pandas as pd
import pytest

from helpers.chapters import swiglu
from helpers.chapters.swiglu import derived_costs
from helpers.chapters.swiglu.accuracy import GRADIENTS
from helpers.chapters.swiglu.layers import BUDGET, COMPILED, PLAIN


def stack(level, peak, backward, dtype="float32", batch=2, seq_len=8, hidden_dim=4, num_layers=2):
    row = {"batch": batch, "seq_len": seq_len, "hidden_dim": hidden_dim, "intermediate_size": 4 * hidden_dim}
    row |= {"num_layers": num_layers, "dtype": dtype, "checkpoint_level": level}
    return row | {"forward_s": 1.0, "backward_s": backward, "peak_gib": peak, "n": 20}


STACKS = pd.DataFrame(
    [
        *(stack(level, peak, backward) for level, peak, backward in ((0, 10.0, 2.0), (1, 5.0, 2.6), (2, 8.0, 2.0))),
        *(stack(level, peak, backward, batch=4) for level, peak, backward in ((0, 20.0, 4.0), (1, 8.0, 5.0))),
        *(stack(1, peak, 1.0, "bfloat16", seq_len=length) for length, peak in ((32, 2.0), (16, 1.0))),
        stack(1, 3.0, 1.0, "bfloat16", seq_len=16, num_layers=4),
    ]
)


def test_levels_are_compared_with_level_0_of_the_same_shape():
    sweep = swiglu.sweep.of_rows(STACKS)
    assert f"{sweep.level1.lower.least} {sweep.level1.lower.most}" == "50% 60%"
    assert f"{sweep.level1.longer.least} {sweep.level1.longer.most}" == "25% 30%"
    assert f"{sweep.level2.lower.least} {sweep.predicted}" == "20% 33%"
    assert sweep.table["batch"].tolist() == [2, 4]
    assert sweep.table["peak 1, GiB"].tolist() == [5, 8] and sweep.table["backward 2, s"].tolist()[0] == 2
    assert sweep.apart.measured


def test_a_single_pass_tells_memory_and_no_time():
    once = pd.DataFrame([stack(0, 10.0, 1.0, batch=8), stack(1, 1.0, 9.0, batch=8)]).assign(n=1)
    sweep = swiglu.sweep.of_rows(pd.concat([STACKS, once]))
    assert f"{sweep.level1.lower.most} {sweep.level1.longer.most}" == "90% 30%"


def test_without_level_0_there_is_no_reduction():
    sweep = swiglu.sweep.of_rows(STACKS[STACKS["checkpoint_level"] > 0])
    assert not sweep.level1.lower.least.measured
    assert len(sweep.table) == 2


def test_one_thing_grows_in_each_panel():
    growth = swiglu.growth.of_rows(STACKS)
    lengths, _, depths = growth.panels.values()
    assert growth.dtype == "bf16"
    assert (lengths["x"].tolist(), lengths["peak_mib"].tolist()) == ([16, 32], [1024, 2048])
    assert depths["x"].tolist() == [2, 4]


SPREAD = {"": 1.0, "_p20": 0.99, "_p80": 1.01}


def layer(variant, ms, stored, dtype="bfloat16", hidden_dim=2048):
    row = {"batch": 1, "seq_len": 1000, "hidden_dim": hidden_dim, "intermediate_size": 8192, "dtype": dtype}
    row |= {"variant": variant, "median_ms": ms, "p20_ms": ms - 1, "p80_ms": ms + 1}
    ratios = {f"ratio_to_{to}{end}": by * ms / 100 for to in ("plain", "compiled") for end, by in SPREAD.items()}
    return row | ratios | {"n": 20, "saved_ratio": stored, "peak_added_mib": 64.0}


LAYERS = pd.DataFrame(
    [
        *(layer(*of) for of in ((PLAIN, 110, 1.0), (COMPILED, 100, 0.8), (BUDGET, 120, 0.3))),
        *(layer(*of) for of in (("level 1", 125, 0.06), ("level 2", 100, 0.53))),
        layer("level 2", 104, 0.5, "float32"),
    ]
)
CEILINGS = pd.DataFrame({"dtype": ["bfloat16", "bfloat16", "float32"], "tflops": [1.0, 2.0, 0.5]})


def test_a_level_is_compared_in_each_type():
    peers = swiglu.peers.of_rows(LAYERS, CEILINGS)
    assert (peers.half.dtype, peers.single.dtype) == ("bf16", "fp32")
    assert f"{peers.half.level1_to_level2} {peers.half.stored2}" == "1.25× (1.24 to 1.26, unpaired) 53%"
    assert f"{peers.half.budget:brief}" == "1.20×"
    assert not peers.half.level3.measured
    less = LAYERS["peak_added_mib"].where(LAYERS["variant"] != "level 2", 32.0)
    half = swiglu.peers.of_rows(LAYERS.assign(peak_added_mib=less), CEILINGS).half
    assert f"{half.peak2} {half.peak_budget}" == "0.50× 1.00×"
    assert f"{peers.single.level2}" == "1.04× (1.03 to 1.05, 20 pairs)"
    assert f"{peers.level2_slowest:brief} {peers.level2_stored}" == "1.04× 53%"
    assert peers.tokens == "1000 tokens"


def test_no_ratio_of_levels_is_taken_from_a_host_bound_row():
    def host_bound(variant):
        shares = [0.5 if name == variant else 0.99 for name in LAYERS["variant"]]
        return swiglu.peers.of_rows(LAYERS.assign(device_share=shares), CEILINGS)

    peers = host_bound(COMPILED)
    assert not peers.half.level2.measured and peers.half.level2_to_plain.measured
    peers = host_bound("level 2")
    assert not peers.half.level2_to_plain.measured and not peers.level2_slowest.measured
    assert peers.table.set_index("variant").loc["level 2", "ms at d = 2048 (p20–p80)"].startswith("100‡ (")


def test_the_bound_is_the_products_at_the_best_rate():
    table = swiglu.peers.of_rows(LAYERS, CEILINGS).table.set_index("variant")
    product_ms = 2 * 1000 * 2048 * 8192 / 2e12 * 1e3
    assert table.loc["level 2", "bound, ms"] == pytest.approx(9 * product_ms)
    assert table.loc["level 1", "bound, ms"] == pytest.approx(11 * product_ms)
    assert table.loc["level 2", "ms at d = 2048 (p20–p80)"] == "100 (99–101)"
    wide = swiglu.peers.of_rows(
        pd.concat([LAYERS, pd.DataFrame([layer(PLAIN, 1, 1.0, hidden_dim=64)])]), CEILINGS
    ).table
    assert {"ms at d = 64 (p20–p80)", "ms at d = 2048 (p20–p80)", "peak, MiB"} < set(wide)


def test_a_noisy_row_is_marked_and_no_goal_takes_it_beside_a_quiet_one():
    narrow = layer("level 2", 130, 0.53, hidden_dim=64) | {"noisy": "p80 is 1.37 times p20", "seq_len": 500}
    peers = swiglu.peers.of_rows(pd.concat([LAYERS.assign(noisy=""), pd.DataFrame([narrow])]), CEILINGS)
    assert f"{peers.level2_slowest:brief}" == "1.04×"
    assert peers.tokens == "1000 tokens and 500 tokens"
    assert peers.table.set_index("variant").loc["level 2", "ms at d = 64 (p20–p80)"] == "130† (129–131)"
    assert f"{swiglu.peers.of_rows(pd.DataFrame([narrow]), CEILINGS).level2_slowest:brief}" == "1.30×†"


def test_the_tasks_own_table_agrees_with_its_allocations():
    printed = derived_costs.printed()
    np.testing.assert_allclose(printed.table["reduction_gib"], printed.table["derived_gib"], atol=1e-3)
    assert f"{printed.longer.least} {printed.longer.most}" == "28% 32%"


def test_level_3_alone_rounds():
    errors = {f"{layer}{name}_error": 0.1 for layer in ("", "plain_") for name in GRADIENTS}
    rows = [{"dtype": "float32", "checkpoint_level": level} | errors for level in (0, 1, 3)]
    accuracy = swiglu.accuracy.of_rows(pd.DataFrame(rows).assign(grad_W_error=[0.01, 0.02, 0.5]))
    errors = accuracy.rounded["float32"], accuracy.exact["float32"], accuracy.plain["float32"]
    assert [f"{error}" for error in errors] == ["50.00%", "10.00%", "10.00%"]
    assert not accuracy.rounded["bfloat16"].measured
