"""The whole training by stages on a GPU: every stage runs alone and beside the others, and it learns the same."""

import math

import pytest
from torch import nn

from helpers.chapters.summary.stages import CUMULATIVE, NAMES, chosen
from helpers.kernels import LayerNorm
from helpers.training.stages import FUSED, MIXED, STAGES, build_trainer, run

pytest.importorskip("torchtext", reason="the text is tokenised by torchtext, which isn't here", exc_type=ImportError)

ONE_STEP = {"samples": 64, "validation_samples": 64}
FAST = {"samples": 32, "validation_samples": 8, "workers": 0, "dropout": 0.0}


@pytest.mark.parametrize("names", [[], *([name] for name in STAGES), list(STAGES)], ids="+".join)
def test_a_training_with_any_stage_ends_near_the_plain_one(names):
    row = run(names, **FAST)
    assert math.isfinite(row["validation_loss"])
    assert row["validation_loss"] == pytest.approx(run([], **FAST)["validation_loss"], abs=0.3)
    assert row["peak_gib"] > 0


def test_norms_are_ours_where_they_are_fused():
    model = build_trainer(frozenset({MIXED, FUSED}), preset="small", **FAST).model
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert norms and all(isinstance(norm, LayerNorm) for norm in norms)


@pytest.mark.parametrize("names", [[FUSED], chosen(CUMULATIVE, FUSED, NAMES)], ids="+".join)
def test_after_one_step_all_kernels_of_our_norms_are_compiled(names):
    from helpers.kernels import norm_kernels

    def compiled():
        kernels = (norm_kernels._forward_kernel, norm_kernels._backward_kernel, norm_kernels._sum_kernel)
        return [sum(len(caches[0]) for caches in kernel.device_caches.values()) for kernel in kernels]

    shape = {"preset": "full", "layers": 1, "batch_size": 64}
    run(names, **shape, **ONE_STEP)
    before = compiled()
    run(names, **shape, samples=256, validation_samples=128, seed=1)
    assert all(before) and compiled() == before
