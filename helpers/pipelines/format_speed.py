"""How fast each format is: samples a second by order, workers and cache; what it takes on disk, to build, to look up.

    row = measure_format("image", "webdataset", count=8000, workers=2, order="sequential", cold=True)

What is read is touched, byte by byte (crc32, about 1 GB/s), and not decoded, so that storage is measured and not JPEG;
`decode=True` decodes as well. Every epoch is checked to have touched what was written, all of it, once.
"""

import functools
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from helpers.lab import Disagreement
from helpers.lab.arguments import check_choice
from helpers.lab.machine import missing_because

from .formats import FORMATS, ORDERS, Sample, Stream, decode
from .formats.dataset import SUFFIXES
from .page_cache import evict, flush
from .samples import image_samples, token_samples

STATUS = "status"
BATCH = 64
BY_INDEX = "webdataset by index"
# what is measured -> the format that is written, and how it is opened
WAYS: dict[str, tuple[str, dict]] = {name: (name, {}) for name in FORMATS} | {
    BY_INDEX: ("webdataset", {"by_index": True})
}
SHARDS = 16  # twice the workers that are measured at most: each then has whole shards
LOOKUPS = 200  # how many samples are looked up, and timed each
SHARE = 0.01  # of all samples: the subset that is fetched


@dataclass(frozen=True)
class Source:
    """Which samples: drawn images, or the photos of a clothing dataset's folder; or synthetic text."""

    kind: str
    count: int = 8000
    size: tuple[int, int] = (160, 213)
    seed: int = 0
    photos: str | None = None


@dataclass(frozen=True)
class Prepared:
    """A data set on disk, and what it took."""

    folder: Path
    build_s: float
    bytes_on_disk: int  # lengths of the files
    bytes_allocated: int  # blocks of files and folders, which is what the disk has less
    files: list[Path]
    touched: tuple[int, int, int]  # samples, bytes of data, sum of crc32s: what an epoch must come to


def measure_format(
    kind: str,
    format: str,
    count: int = 8000,
    workers: int = 0,
    order: str = "sequential",
    cold: bool = False,
    *,
    repeats: int = 3,
    decode: bool = False,
    verify: bool = False,
    size: tuple[int, int] = (160, 213),
    seed: int = 0,
    photos: str | None = None,
    folder: str | None = None,
) -> dict:
    """A row of one of `WAYS`: `samples_per_s` of an epoch (median, p20, p80 over repeats), and the costs of the format.

    Worker processes are started, and the data set is opened, before time is taken. `cold` drops its files from the
    page cache before each epoch, and the row's `cache` says how far that went; if the file system doesn't let go, the
    row has no speed and its status says so. `folder` is where data is written (a temporary folder below it), `photos` a
    clothing dataset to take images from.

    Measured once for a format and cache, in one process, and the same in all rows about it: `raw_s`, to read the bare
    files from end to end, which is the limit that a reader in order has; `lookup_us`, the median of single samples by
    index; `subset_s`, to fetch 1 % of all, at random places; `find_s`, to open the data set and find a label's places.
    """
    check_choice(SUFFIXES, kind=kind)
    check_choice(WAYS, format=format)
    check_choice(ORDERS, order=order)
    if decode and kind != "image":
        raise ValueError(f"decode is {decode!r}; {kind} has nothing to decode")
    if reason := missing_because(*FORMATS[WAYS[format][0]].NEEDS):
        return {STATUS: reason}
    source = Source(kind, count, tuple(size), seed, photos)
    data = prepared(source, WAYS[format][0], folder)
    row = {
        "build_s": data.build_s,
        "bytes_on_disk": data.bytes_on_disk,
        "bytes_allocated": data.bytes_allocated,
        "files": len(data.files),
        "payload_bytes": data.touched[1],
    }
    seconds, caches = [], []
    for repeat in range(repeats):
        took, cache = _epoch(data, format, workers, order, cold, decode, verify, repeat)
        if cache.startswith("warm:"):
            return row | {STATUS: f"not cold: {cache.removeprefix('warm: ')}", "cache": cache}
        seconds.append(took)
        caches.append(cache)
    speed = count / np.percentile(seconds, [50, 80, 20])  # the 80th percentile of time is the 20th of speed
    row |= dict(zip(("samples_per_s", "samples_per_s_p20", "samples_per_s_p80"), speed.tolist(), strict=True))
    row |= {"mb_per_s": float(speed[0]) * data.touched[1] / count / 1e6, "n": repeats, "cache": caches[-1]}
    return row | _once(source, WAYS[format][0], folder, cold)


@functools.lru_cache(maxsize=1)
def samples_of(source: Source) -> list[Sample]:
    """The samples that are written in every format; kept until others are asked for."""
    if source.kind == "image":
        return image_samples(source.count, source.seed, source.size, source.photos)
    return token_samples(source.count, source.seed)


@functools.cache
def prepared(source: Source, format: str, folder: str | None = None) -> Prepared:
    """The data set on disk, written at the first call and flushed; it stays until this process ends."""
    samples = samples_of(source)
    home = Path(tempfile.mkdtemp(prefix=f"{source.kind}-{format}-", dir=_home(folder).name)) / "data"
    sharded = {"per_shard": -(-source.count // SHARDS)} if format in ("webdataset", "tfrecord") else {}
    began = time.perf_counter()
    FORMATS[format].write(samples, home, source.kind, **sharded)
    flush(home)
    build_s = time.perf_counter() - began
    files = sorted(file for file in home.rglob("*") if file.is_file())
    touched = np.sum([_touch(sample) for sample in samples], axis=0)
    return Prepared(
        home,
        build_s,
        sum(file.stat().st_size for file in files),
        sum(path.stat().st_blocks for path in (home, *home.rglob("*"))) * 512,
        files,
        tuple(touched.tolist()),
    )


@functools.cache
def _home(folder: str | None) -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="formats-", dir=folder)


class _Gated(IterableDataset):
    """A stream that gives one empty item until it is let go: the pass before time is taken starts the workers."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.open = torch.zeros((), dtype=torch.bool).share_memory_()

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return iter(self.stream) if self.open else iter([(0, 0, 0)])


def _epoch(
    data: Prepared, format: str, workers: int, order: str, cold: bool, decode: bool, verify: bool, repeat: int
) -> tuple[float, str]:
    """Seconds of an epoch, and how cold it began."""
    name, options = WAYS[format]
    reader = FORMATS[name].open_(data.folder, verify=verify, **options)
    stream = Stream(reader, order, seed=repeat, transform=_decoded if decode else _touch)
    gated = _Gated(stream)
    loader = DataLoader(gated, BATCH, num_workers=workers, persistent_workers=workers > 0, collate_fn=_sum)
    for _ in loader:
        pass
    cache = _set_cache(data, cold)
    gated.open.fill_(True)
    touched = torch.zeros(3, dtype=torch.int64)
    began = time.perf_counter()
    for batch in loader:
        touched += batch
    took = time.perf_counter() - began
    reader.close()
    if tuple(touched.tolist()) != data.touched:
        raise Disagreement(
            f"{format} gave {touched.tolist()} (samples, bytes, sum of crc32), written was {data.touched}"
        )
    return took, cache


@functools.cache
def _once(source: Source, format: str, folder: str | None, cold: bool) -> dict[str, float]:
    """What doesn't depend on order and workers: one sample, 1 % of all, the places of a label, the bare files."""
    data, module = prepared(source, format, folder), FORMATS[format]
    label = samples_of(source)[0].label
    places = np.random.default_rng(source.seed).permutation(source.count).tolist()
    subset = sorted(places[: max(int(SHARE * source.count), 1)])
    reader = module.open_(data.folder, verify=False)

    def seconds(run: Callable[[], object], settle: bool = True) -> float:
        if settle:
            reader.close()
            _set_cache(data, cold)
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    row = {"raw_s": float(np.median([seconds(lambda: _read_all(data.files)) for _ in range(5)]))}
    row["subset_s"] = seconds(lambda: [_touch(reader[place]) for place in subset])
    row["find_s"] = seconds(lambda: module.open_(data.folder, verify=False).find(label))
    seconds(lambda: None)
    lookups = [seconds(lambda place=place: _touch(reader[place]), settle=False) for place in places[-LOOKUPS:]]
    return row | {"lookup_us": float(np.median(lookups)) * 1e6}


def _set_cache(data: Prepared, cold: bool) -> str:
    """Bring a data set's files into the page cache, or out of it; says what they are."""
    if cold:
        return evict(data.files)
    _read_all(data.files)
    return "warm"


def _read_all(files: list[Path]) -> None:
    """Every byte, file after file, into one buffer: the least that a reader of all must do."""
    buffer = bytearray(1 << 20)
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def _touch(sample: Sample) -> tuple[int, int, int]:
    """1, its bytes, and their crc32: every byte is read."""
    return 1, sample.data.nbytes, zlib.crc32(sample.data)


def _decoded(sample: Sample) -> tuple[int, int, int]:
    decode(sample.data)
    return _touch(sample)


def _sum(items: list[tuple[int, int, int]]) -> Tensor:
    return torch.tensor([sum(column) for column in zip(*items, strict=True)])
