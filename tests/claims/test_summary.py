"""What each change is worth, over all settings."""

from helpers.claims import summary
from helpers.lab.values import TIMES, Number, lacking


def test_changes_are_ordered_by_gain_and_those_without_an_effect_are_named():
    llama = {"compile": Number(1.2, TIMES, 1.1, 1.3, 9), "fused_adamw": Number(1.02, TIMES, 0.98, 1.06, 9)}
    vit = {"compile": Number(2.0, TIMES), "set_to_none": Number(1.05, TIMES), "flash": lacking("flash", TIMES)}
    worth = summary.worth({"Llama": llama, "ViT": vit})
    assert list(worth.gains) == ["compile (ViT)", "compile (Llama)"]
    assert worth.unseen == "fused adamw (Llama), set to none (ViT)"


def test_a_small_gain_whose_interval_leaves_1_out_is_one():
    worth = summary.worth({"Llama": {"fused": Number(1.03, TIMES, 1.01, 1.05, 9)}})
    assert list(worth.gains) == ["fused (Llama)"]
