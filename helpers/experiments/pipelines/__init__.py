"""Chapter 6's experiments: loaders, decoders, metrics, formats, data selection, and the speed of Python loops.

Tables are measured in this order, those that use a GPU first.
"""

from helpers.lab import experiment
from helpers.lab.machine import missing_because
from helpers.lab.records import Row
from helpers.pipelines import decoders, samples

from . import decoder_speed, format_speed, idle_device, metric_cost, python_loops, selection

COLD, WARM = "cold", "warm"
TIMES = ("median_ms", "p20_ms", "p80_ms", "n")


def _columns(names: str) -> list[str]:
    return names.split()


PLAIN = {"step_ms": 10.0, "prefetch": 2, "decode": decoders.REFERENCE}
SIMULATED = [PLAIN | {"step_ms": step, "workers": workers} for step in (10.0, 30.0) for workers in (0, 1, 2, 4)]
SIMULATED += [PLAIN | {"workers": 2, "prefetch": 8}]
SIMULATED += [PLAIN | {"workers": 2, "decode": decode} for decode in ("Pillow, draft at half size", "simplejpeg")]


@experiment(
    small=[PLAIN | {"step_ms": 1.0, "workers": 0}],
    cpu=SIMULATED,
    same_work=False,  # several workers' batches come in bursts
    missing=lambda decode, **_: missing_because(*decoders.VARIANTS[decode].needs),
    columns=_columns(
        "sample_ms samples_per_s idle_share predicted_idle_share median_ms p20_ms p80_ms n wait_ms startup_s"
    ),
)
def loader(step_ms: float, workers: int, prefetch: int, decode: str) -> Row:
    """A loop of steps fed by a `DataLoader`: the share of time in which a simulated device waits for data."""
    few = {"steps": 4, "batch": 4} if step_ms == 1.0 else {}
    return idle_device.measure_loader(workers, step_ms, prefetch=prefetch, decode=decode, **few)


@experiment(
    small=[{"width": 64, "height": 48}],
    cpu=[{"width": 400, "height": 300}, {"width": 160, "height": 120}],
    columns=("variant", "scale", "images_per_s", "mb_per_s", *TIMES, "max_difference", "mean_difference"),
)
def decoding(width: int, height: int) -> list[Row]:
    """JPEG decoders in turn in one thread, on the same images; pixels against Pillow's."""
    images = samples.example_jpegs(4 if width < 100 else 16, (width, height))
    return decoder_speed.measure_decoders(images, rounds=5 if width < 100 else 20)


GROUPS = 40  # of an epoch's steps: a row for each


@experiment(
    small=[{"steps": 20, "batch": 16, "classes": 4}],
    cpu=[{"steps": 320, "batch": 256, "classes": 10}],
    gpu=[{"steps": 1000, "batch": 256, "classes": 10}],
    version=2,
    columns=("step", "variant", "ms", "ms_p20", "ms_p80", "until_s"),
)
def metrics_cost(steps: int, batch: int, classes: int) -> list[Row]:
    """Milliseconds of a metric at steps of an epoch, medians of neighbouring steps, by each variant."""
    return metric_cost.measure_metrics(steps, batch, classes, every=max(steps // GROUPS, 1))


CASES = [("sequential", COLD, 0), ("sequential", WARM, 0), ("random", COLD, 0), ("random", WARM, 0)]
COUNTS = {"image": 10_000, "tokens": 10_000}  # 74 and 41 MB


def _passes() -> list[Row]:
    """Images in all cases, in order and cold with workers, too; tokens cold. By position shards have one reader."""
    cases = {"image": [*CASES, ("sequential", COLD, 2)], "tokens": [case for case in CASES if case[1] == COLD]}
    return [
        {"kind": kind, "format": format, "samples": count, "order": order, "cached": cached, "workers": workers}
        for kind, count in COUNTS.items()
        for format in format_speed.VARIANTS
        for order, cached, workers in cases[kind]
        if (format, order) != ("webdataset", "random")
    ]


@experiment(
    small=[
        {"kind": "tokens", "format": format, "samples": 64, "order": "sequential", "cached": WARM, "workers": 0}
        for format in format_speed.VARIANTS
    ],
    cpu=_passes(),
    version=2,
    missing=lambda format, **_: missing_because(*format_speed.needs(format)),
    columns=_columns(
        "build_s files payload_bytes bytes_on_disk bytes_allocated samples_per_s samples_per_s_p20 samples_per_s_p80 "
        "mb_per_s n cache raw_s? subset_s? find_s?"
    ),
)
def formats(kind: str, format: str, samples: int, order: str, cached: str, workers: int) -> Row:
    """Speed of an epoch in each format, with all bytes read; disk space, build and look-up times."""
    return format_speed.measure_format(
        kind,
        format,
        samples,
        workers,
        order,
        cached == COLD,
        repeats=3 if samples > 64 else 1,
        search=(order, cached, workers) == CASES[0],
    )


SHARES = (0.0, 0.3, 0.5, 0.7)
SELECTED = _columns(
    "test_accuracy lost_points wrong_share samples samples_kept test_samples unforgettable_share train_s epochs steps "
    "source"
)


def _selections(seeds: int) -> list[Row]:
    """Each variant at each share, and at 0.3 with as many steps as for all samples."""
    return [
        {"budget": "epochs", "variant": variant, "share": share, "seed": seed} | change
        for seed in range(seeds)
        for variant in selection.VARIANTS
        for share in SHARES
        if share or variant == selection.RANDOM
        for change in ({}, {"budget": "steps"})
        if not change or (share == 0.3 and variant != selection.MOST)
    ]


def _without_scikit_learn(**_: object) -> str:
    return missing_because("scikit-learn")


@experiment(
    small=[
        {"variant": variant, "share": 0.3, "budget": "epochs", "seed": 0}
        for variant in (selection.LEAST, selection.RANDOM)
    ],
    cpu=_selections(5),
    gpu=_selections(10),
    missing=_without_scikit_learn,
    columns=SELECTED,
)
def forgetting(variant: str, share: float, budget: str, seed: int) -> Row:
    """Accuracy after leaving out a share of the samples: the least forgotten, random ones, or the most forgotten."""
    return selection.measure_selection(variant, share, seed, budget=budget)


@experiment(
    small=[{"variant": selection.MOST, "wrong": 0.1, "seed": 0}],
    cpu=[
        {"variant": variant, "wrong": 0.1, "seed": seed}
        for seed in range(3)
        for variant in (selection.MOST, selection.RANDOM)
    ],
    version=2,
    missing=_without_scikit_learn,
    columns=SELECTED,
)
def wrong_labels(variant: str, wrong: float, seed: int) -> Row:
    """A tenth of the labels are wrong, and as many samples are left out: the share of wrong labels among them."""
    return selection.measure_selection(variant, wrong, seed, wrong=wrong)


# Compilers copy the text of `strings` at each turn: 10⁵ turns take numba a second.
LOOP_SIZES = {"strings": (10**2, 10**3, 10**4), "integers": (10**2, 10**4, 10**6)}


@experiment(
    small=[{"program": "integers", "size": 1000}],
    cpu=[{"program": program, "size": size} for program, sizes in LOOP_SIZES.items() for size in sizes],
    version=2,
    columns=("variant", *TIMES, "compile_s?", "speedup?", "turns?"),
)
def jit(program: str, size: int) -> list[Row]:
    """A loop by the interpreter and by compilers, compile time separately, and the size from which compiling pays."""
    return python_loops.measure_jit(program, size)


@experiment(small=[{"exponent": 2}], cpu=[{"exponent": 5}], columns=("variant", "part", *TIMES))
def process_start(exponent: int) -> list[Row]:
    """The parts of a single timing of a process: start, import, loop."""
    return python_loops.process_start(exponent, repeat=3 if exponent == 2 else 20)
