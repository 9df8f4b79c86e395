"""Is the loader the bottleneck? The device's idle time while it waits for data, measured and predicted.

A batch takes the device `step_ms`, and one core `batch · sample_ms` to decode, crop and collate. With W workers in
parallel an iteration takes `max(step_ms, batch · sample_ms / W)`, and the device is idle for the rest: more workers
help until the two are equal, or until there is no core left for another.

The device is a timer of `step_ms` a batch that uses no core, like a GPU: the host sleeps.
"""

import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pandas as pd
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ...book.table import Worth, table
from ...book.values import PERCENT, Number, derived, pick
from ...lab import Row, missing_because
from ...pictures import cores
from ...pictures.transforms import cut_image, draw_cuts, random_boxes, to_tensor
from ...pipelines import decoders
from ...pipelines.samples import example_jpegs

CLASSES, SIDE = 10, 64
AHEAD = 2  # steps that the host may be ahead of the simulated device
PLAIN = {"step_ms": 10.0, "prefetch": 2, "decode": decoders.REFERENCE}
SIMULATED = [PLAIN | {"step_ms": step, "workers": workers} for step in (10.0, 30.0) for workers in (0, 1, 2, 4)]
SIMULATED += [PLAIN | {"workers": 2, "prefetch": 8}]
SIMULATED += [PLAIN | {"workers": 2, "decode": decode} for decode in ("Pillow, draft at half size", "simplejpeg")]


class JpegCrops(Dataset):
    """Item i: a random crop of a decoded JPEG, resized to (3, SIDE, SIDE) uint8, and its label.

    The compressed images are in memory, so that no disk is measured. Item i is image i modulo their number, and its
    crop depends on i only, not on the worker.
    """

    def __init__(self, images: Sequence[bytes], count: int, decoder: str) -> None:
        self.images, self.decoder = images, decoder
        self.cuts = draw_cuts(count, 0, 0)

    def __len__(self) -> int:
        return len(self.cuts)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        at = index % len(self.images)
        image = Image.fromarray(decoders.decode(self.decoder, self.images[at]))
        crop = cut_image(image, random_boxes(self.cuts[index], np.array(image.size)), SIDE)
        if self.cuts[index, 4]:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return to_tensor(crop), at % CLASSES


@table(
    small=[PLAIN | {"step_ms": 1.0, "workers": 0}],
    cpu=SIMULATED,
    gpu=[],  # the device is simulated
    same_work=False,  # several workers' batches come in bursts
    missing=lambda decode, **_: missing_because(*decoders.VARIANTS[decode].needs),
    columns="sample_ms samples_per_s idle_share predicted_idle_share wait_ms startup_s",
    worth=Worth(3, "how idle a device is by workers", cpu=3.2),
)
def loader(step_ms: float, workers: int, prefetch: int, decode: str) -> Row:
    """A loop of steps fed by a `DataLoader`: the share of time in which a simulated device waits for data.

    The device works while the host fetches the next batch.

    `idle_share` is the share of the loop's time in which the device is idle; `predicted_idle_share` is `predict`'s,
    from `step_ms` and `sample_ms`, the time to load one sample in this process, without competing workers. `wait_ms` is
    the median of the host's wait for a batch, `startup_s` the wait for the first one, including the workers' start.
    Times are of 40 iterations (of 4 where a step takes 1 ms), after a warm-up that uses up the prefetched batches.
    """
    steps, batch = (40, 32) if step_ms > 1 else (4, 4)
    warmup = 3 + prefetch * workers
    count = (2 * warmup + steps) * batch  # enough that workers are still loading during the last timed step
    dataset = JpegCrops(example_jpegs(16), count, decode)
    load_ms = _load_ms(dataset, batch)
    device, waits_ms = SimulatedDevice(step_ms), []
    batches = _batches(dataset, batch, workers, prefetch)
    for _ in range(warmup + steps):
        began = time.perf_counter()
        next(batches)
        waits_ms.append((time.perf_counter() - began) * 1e3)
        device.step()
    sample_ms = statistics.median(load_ms + _load_ms(dataset, batch)) / batch
    row = {"sample_ms": sample_ms, "predicted_idle_share": predict(step_ms, batch * sample_ms, workers)}
    row |= {"wait_ms": statistics.median(waits_ms[warmup:]), "startup_s": waits_ms[0] / 1e3}
    return row | summary(device.spans, warmup, batch)


def predict(step_ms: float, load_ms: float, workers: int) -> float:
    """The predicted idle share of the device, from its time for a batch and one core's time to load a batch.

    Without workers the main process loads, while the device works. Loading uses at most as many processes as there are
    cores.
    """
    return 1 - step_ms / max(step_ms, load_ms / min(max(workers, 1), cores()))


class SimulatedDevice:
    """A device that takes `step_ms` a batch, one after another. The host may be `AHEAD` steps ahead."""

    def __init__(self, step_ms: float) -> None:
        self.step_ms = step_ms
        self.spans: list[tuple[float, float]] = []  # begin and end of each step, in milliseconds

    def step(self) -> None:
        begin = time.perf_counter() * 1e3
        if self.spans:
            begin = max(begin, self.spans[-1][1])
        self.spans.append((begin, begin + self.step_ms))
        if len(self.spans) > AHEAD:
            time.sleep(max(self.spans[-1 - AHEAD][1] / 1e3 - time.perf_counter(), 0))


def _batches(dataset: Dataset, batch: int, workers: int, prefetch: int) -> Iterator:
    """A `DataLoader`'s batches in order; the workers start with the first one."""
    options = {"prefetch_factor": prefetch} if workers else {}
    with warnings.catch_warnings():  # measuring more workers than cores is intended
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        batches = iter(DataLoader(dataset, batch, num_workers=workers, **options))
    yield from batches


def summary(spans: list[tuple[float, float]], warmup: int, batch: int) -> Row:
    """Throughput and idle share, from the begins and ends of the device's steps after warm-up."""
    timed = spans[warmup:]
    wall_ms = timed[-1][1] - spans[warmup - 1][1]
    device_ms = sum(end - begin for begin, end in timed)
    return {"samples_per_s": 1e3 * len(timed) * batch / wall_ms, "idle_share": max(1 - device_ms / wall_ms, 0.0)}


def _load_ms(dataset: Dataset, batch: int) -> list[float]:
    """Milliseconds of loading and collating a batch in this process, three times after a warm-up."""
    taken = []
    for _ in range(4):
        began = time.perf_counter()
        next(iter(DataLoader(dataset, batch)))
        taken.append((time.perf_counter() - began) * 1e3)
    return taken[1:]


# Numbers

STEP_MS = 10  # of the simulated device whose idle shares are quoted


@loader.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Idle shares of the device, measured and predicted: by workers, and with other loaders."""
    rows = rows.assign(error=100 * (rows["idle_share"] - rows["predicted_idle_share"]))
    plain = (rows["prefetch"] == 2) & (rows["decode"] == "Pillow")

    def idle(workers: int, prefetch: int = 2, decode: str = "Pillow") -> Number:
        return pick(rows, "idle_share", PERCENT, 0, step_ms=STEP_MS, workers=workers, prefetch=prefetch, decode=decode)

    return SimpleNamespace(
        lines={f"step of {step:.0f} ms": of.sort_values("workers") for step, of in rows[plain].groupby("step_ms")},
        no_workers=idle(0),
        two_workers=idle(2),
        simplejpeg=idle(2, decode="simplejpeg"),
        half_size=idle(2, decode="Pillow, draft at half size"),
        prefetched=idle(2, prefetch=8),
        rows=len(rows),
        median_error=Number(rows["error"].abs().median(), "points", decimals=1),
        trivial=derived(((rows["predicted_idle_share"] == 0) & (rows["idle_share"] == 0)).sum(), "counted", "", 0),
        fastest_sample=Number(rows.loc[rows["decode"] == "Pillow", "sample_ms"].min(), "ms", decimals=2),
        slowest_sample=Number(rows.loc[rows["decode"] == "Pillow", "sample_ms"].max(), "ms", decimals=2),
        largest_error=Number(rows["error"].abs().max(), "points", decimals=0),
    )
