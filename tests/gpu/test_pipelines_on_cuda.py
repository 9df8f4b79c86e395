"""The metrics and the decoders on a GPU: what only shows there."""

import pytest
import torch

from helpers.chapters.pipelines.metrics_cost import TOLERANCE, VARIANTS, random_batches
from helpers.lab.machine import missing_because

USABLE = [name for name, (_, needs) in VARIANTS.items() if not missing_because(*needs)]


@pytest.mark.parametrize("variant", USABLE)
def test_scores_are_the_same_as_on_the_cpu(variant):
    actual = []
    for device in map(torch.device, ("cpu", "cuda")):
        metric = VARIANTS[variant][0](7, device)
        for logits, labels in random_batches(3, 64, 7, device):
            metric.step(logits, labels)
        actual.append(metric.compute())
    assert actual[1] == pytest.approx(actual[0], abs=TOLERANCE)


def test_a_confusion_matrix_never_waits_for_the_device_and_collecting_does(no_waiting):
    batches = random_batches(2, 64, 7, torch.device("cuda"))
    ours = VARIANTS["confusion matrix"][0](7, torch.device("cuda"))
    ours.step(*batches[0])
    no_waiting()
    ours.step(*batches[1])
    if "scikit-learn, at the end" in USABLE:
        with pytest.raises(RuntimeError, match="synchroniz"):
            VARIANTS["scikit-learn, at the end"][0](7, torch.device("cuda")).step(*batches[1])
