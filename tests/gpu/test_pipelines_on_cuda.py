"""The loader, the metrics and the decoders on a GPU: what only shows there."""

import numpy as np
import pytest
import torch

from helpers.experiments.pipelines.decoder_speed import MEAN_TOLERANCE, measure_decoders
from helpers.experiments.pipelines.idle_device import JpegCrops, Training, convnet, first_batch, measure_loader
from helpers.experiments.pipelines.metric_cost import TOLERANCE, VARIANTS, measure_metrics, random_batches
from helpers.lab.machine import missing_because
from helpers.pipelines import decoders
from helpers.pipelines.decoders import ImageError, decode, decode_all
from helpers.pipelines.samples import example_jpegs

USABLE = [name for name, variant in VARIANTS.items() if not missing_because(*variant.needs)]


@pytest.fixture(scope="module")
def images():
    pytest.importorskip("PIL")
    return example_jpegs(4, (64, 48))


@pytest.mark.parametrize("pinned", [False, True])
def test_a_loop_on_the_gpu_is_timed_by_its_clock(pinned, images):
    row = measure_loader(1, "cuda", pinned=pinned, batch=8, steps=10, side=32, images=images)
    assert row["n"] == 10
    assert 0 <= row["idle_share"] < 1
    assert row["device_ms"] > 0


def test_a_gpu_that_waits_for_a_slow_loader_is_idle_and_one_with_work_is_not():
    slow = measure_loader(0, "cuda", batch=16, steps=10, side=32, images=example_jpegs(1, (800, 600)))
    assert slow["idle_share"] > 0.5
    busy = Training(convnet(64, 4), torch.device("cuda"), False)
    batch = (torch.zeros(64, 3, 128, 128, dtype=torch.uint8, device="cuda"), torch.zeros(64, dtype=int, device="cuda"))
    for _ in range(20):
        busy(batch)
    spans = busy.spans()[5:]
    worked = sum(end - begin for begin, end in spans)
    assert worked / (spans[-1][1] - spans[0][0]) > 0.9


def test_the_same_steps_are_taken_on_both_devices(images):
    batch = first_batch(JpegCrops(images, 8, 32, "Pillow"), 8)
    losses = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        work = Training(convnet(8, 1), torch.device(device), False)
        losses.append([float(work.step(*(part.to(device) for part in batch))) for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=0.05)  # bf16 against fp32


@pytest.mark.parametrize("variant", USABLE)
def test_scores_are_the_same_as_on_the_cpu(variant):
    actual = []
    for device in map(torch.device, ("cpu", "cuda")):
        metric = VARIANTS[variant].make(7, device)
        for logits, labels in random_batches(3, 64, 7, device):
            metric.step(logits, labels)
        actual.append(metric.compute())
    assert actual[1] == pytest.approx(actual[0], abs=TOLERANCE)


def test_a_confusion_matrix_never_waits_for_the_device_and_collecting_does():
    batches = random_batches(2, 64, 7, torch.device("cuda"))
    ours = VARIANTS["confusion matrix"].make(7, torch.device("cuda"))
    ours.step(*batches[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours.step(*batches[1])
        if "scikit-learn, at the end" in USABLE:
            with pytest.raises(RuntimeError, match="synchroniz"):
                VARIANTS["scikit-learn, at the end"].make(7, torch.device("cuda")).step(*batches[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_metrics_are_measured_on_the_gpu():
    assert len(measure_metrics(4, 32, 5)) == 4 * len(USABLE)


def test_nvjpeg_gives_tensors_on_the_gpu_close_to_pillow(images):
    if reason := missing_because(*decoders.VARIANTS["nvJPEG"].needs):
        pytest.skip(reason)
    actual = decode_all("nvJPEG", images)
    assert all(pixels.is_cuda and pixels.shape == (3, 48, 64) for pixels in actual)
    expected = decode("Pillow", images[0]).astype(int)
    assert np.abs(actual[0].permute(1, 2, 0).cpu().numpy() - expected).mean() <= MEAN_TOLERANCE
    with pytest.raises(ImageError, match=r"^nvJPEG: truncated"):
        decode_all("nvJPEG", [images[0][:500]])


def test_decoders_of_the_host_are_timed_beside_a_gpu(images):
    rows = measure_decoders(images, ["Pillow", "Pillow, draft at half size"], rounds=3)
    assert all(row["median_ms"] > 0 for row in rows)
