"""Speed of each format: samples a second by order and cache; disk space; time to build and to look up.

Every byte is read (crc32, about 1 GB/s) but not decoded, to measure storage and not JPEG decoding. Each epoch is
checked to have read every sample exactly once.

A cold read starts with files outside of the page cache; `evict` drops them and checks it. Caches of the disk, its
controller or a virtual machine's host can't be dropped: cold means that the kernel has to read from the disk. On a file
system in memory (tmpfs) and on some network file systems files can't be dropped at all.
"""

import ctypes
import functools
import mmap
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ...book.table import Worth, table
from ...book.values import TIMES, Number, lacking, over, pick
from ...lab import STATUS, Disagreement, Row, missing_because
from ...pipelines.formats import FORMATS, Sample
from ...pipelines.random_access import Tar
from ...pipelines.reader import SUFFIXES, Reader
from ...pipelines.samples import image_samples, token_windows

BATCH = 64
BY_INDEX = "webdataset by index"


class ByLibrary(Tar):
    """Streams by the webdataset library's reader, which can only start with a shard."""

    def in_order(self, piece: range) -> Iterator[Sample]:
        import webdataset

        stages = {"shardshuffle": False, "nodesplitter": None, "workersplitter": None, "empty_check": False}
        for position, row in zip(piece, webdataset.WebDataset([self.file_of(piece.start)], **stages), strict=False):
            yield self._sample(position, row[SUFFIXES[self.kind]])


# variant -> the format that is written, and what opens it
VARIANTS: dict[str, tuple[str, Callable[..., Reader]]] = {
    "files": ("files", FORMATS["files"].open_),
    "webdataset": ("webdataset", ByLibrary),
    BY_INDEX: ("webdataset", Tar),
    "mapped": ("mapped", FORMATS["mapped"].open_),
    "tfrecord": ("tfrecord", FORMATS["tfrecord"].open_),
}
COLD, WARM = "cold", "warm"
CASES = [("sequential", COLD), ("sequential", WARM), ("random", COLD), ("random", WARM)]
COUNTS = {"image": 10_000, "tokens": 10_000}  # 74 and 41 MB
REPEATS = 3
SHARDS = 16
SHARE = 0.01  # of all samples: the subset that is fetched
DROP = "/proc/sys/vm/drop_caches"
NOT_COLD = "not cold: "


class Epoch(IterableDataset):
    """What `_touch` gives of each sample, in order or in a random order that follows from the seed."""

    def __init__(self, reader: Reader, order: str, seed: int) -> None:
        self.reader, self.order, self.seed = reader, order, seed

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        if self.order == "sequential":
            return map(_touch, self.reader.stream())
        order = np.random.default_rng(self.seed).permutation(len(self.reader)).tolist()
        return (_touch(self.reader[position]) for position in order)


class Prepared(NamedTuple):
    """A data set on disk, the time to build it, and its size."""

    folder: Path
    build_s: float
    files: list[Path]
    touched: tuple[int, int, int]  # samples, bytes of data, sum of crc32s: expected of an epoch
    label: int  # of the first sample


def _passes() -> list[Row]:
    """Images in all cases, tokens cold. By position shards are read by our index alone: neither library can."""
    return [
        {"kind": kind, "format": format, "samples": count, "order": order, "cached": cached}
        for kind, count in COUNTS.items()
        for format in VARIANTS
        for order, cached in CASES
        if (order == "sequential" or format not in ("webdataset", "tfrecord")) and (kind == "image" or cached == COLD)
    ]


@table(
    small=[
        {"kind": "tokens", "format": format, "samples": 64, "order": "sequential", "cached": WARM}
        for format in VARIANTS
    ],
    cpu=_passes(),
    gpu=[],
    version=2,
    missing=lambda format, **_: missing_because(*FORMATS[VARIANTS[format][0]].needs),
    columns="build_s files payload_bytes bytes_allocated samples_per_s samples_per_s_p20 "
    "samples_per_s_p80 mb_per_s n cache raw_s? subset_s? find_s?",
    worth=Worth(2, "file formats", cpu=3.5),
)
def formats(kind: str, format: str, samples: int, order: str, cached: str) -> Row:
    """Speed of an epoch in a format, `samples_per_s` (median, p20, p80), with all bytes read; and what else it costs.

    Opening the data set isn't timed. Cold, the files are dropped from the page cache before
    each epoch, and the row's `cache` says what was dropped; if the file system doesn't support it, the row has no speed
    and its status says so.

    Cold and in order, `raw_s` is the median time to read the files from end to end, which a reader can only reach;
    `subset_s` to fetch a random 1 %; `find_s` to open the data set and find the samples of a label.
    """
    written, open_ = VARIANTS[format]
    data, cold = prepared(kind, samples, written), cached == COLD
    row = {"build_s": data.build_s, "files": len(data.files), "payload_bytes": data.touched[1]}
    row["bytes_allocated"] = sum(path.stat().st_blocks for path in (data.folder, *data.folder.rglob("*"))) * 512
    reader = open_(data.folder, verify=False)
    seconds = []
    for repeat in range(REPEATS):
        took, touched, cache = _epoch(data, Epoch(reader, order, repeat), cold)
        if touched != data.touched:
            raise Disagreement(f"{format} gave {touched} (samples, bytes, sum of crc32), written was {data.touched}")
        if cache.startswith(NOT_COLD):
            return row | {STATUS: cache}
        seconds.append(took)
    median, p20, p80 = (samples / np.percentile(seconds, [50, 80, 20])).tolist()  # slow times are low speeds
    row |= {"samples_per_s": median, "samples_per_s_p20": p20, "samples_per_s_p80": p80, "n": REPEATS}
    row |= {"mb_per_s": median * data.touched[1] / samples / 1e6, "cache": cache}
    if (order, cached) != CASES[0]:
        return row

    def once(run: Callable[[], object]) -> float:
        reader.close()
        _set_cache(data, cold)
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    positions = np.random.default_rng(0).permutation(samples)[: max(int(SHARE * samples), 1)].tolist()
    row["raw_s"] = float(np.median([once(lambda: _read_all(data.files)) for _ in range(REPEATS)]))
    row["subset_s"] = once(lambda: [_touch(reader[at]) for at in positions])
    return row | {"find_s": once(lambda: open_(data.folder, verify=False).find(data.label))}


@functools.lru_cache(maxsize=1)
def samples_of(kind: str, count: int) -> list[Sample]:
    """The samples that are written in every format; cached for the latest kind."""
    return image_samples(count) if kind == "image" else token_windows(count)


@functools.cache
def prepared(kind: str, count: int, format: str) -> Prepared:
    """The data set on disk, written and flushed at the first call, and deleted when the process ends."""
    samples = samples_of(kind, count)
    home = Path(tempfile.mkdtemp(prefix=f"{kind}-{format}-", dir=_temporary_folder().name)) / "data"
    sharded = {"per_shard": -(-count // SHARDS)} if format in ("webdataset", "tfrecord") else {}
    began = time.perf_counter()
    FORMATS[format].write(samples, home, kind, **sharded)
    os.sync()  # as only clean pages can be dropped
    build_s = time.perf_counter() - began
    files = sorted(file for file in home.rglob("*") if file.is_file())
    touched = np.sum([_touch(sample) for sample in samples], axis=0)
    return Prepared(home, build_s, files, tuple(touched.tolist()), samples[0].label)


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="formats-")


def _epoch(data: Prepared, epoch: Epoch, cold: bool) -> tuple[float, tuple[int, ...], str]:
    """Seconds of an epoch, the counts of what was read, and the cache's state at its start."""
    loader, touched = DataLoader(epoch, BATCH, collate_fn=_sum), torch.zeros(3, dtype=torch.int64)
    cache = _set_cache(data, cold)
    began = time.perf_counter()
    for batch in loader:
        touched += batch
    took = time.perf_counter() - began
    epoch.reader.close()
    return took, tuple(touched.tolist()), cache


def _set_cache(data: Prepared, cold: bool) -> str:
    """Bring a data set's files into the page cache, or drop them from it; returns the resulting state."""
    if cold:
        return evict(data.files)
    _read_all(data.files)
    return "warm"


def _read_all(files: list[Path]) -> None:
    """Read every byte, file after file, into one buffer: the lower bound for any reader."""
    buffer = bytearray(1 << 20)
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def _touch(sample: Sample) -> tuple[int, int, int]:
    """(1, number of bytes, crc32) of a sample; reads every byte."""
    return 1, sample.data.nbytes, zlib.crc32(sample.data)


def _sum(items: list[tuple[int, int, int]]) -> Tensor:
    return torch.tensor([sum(column) for column in zip(*items, strict=True)])


def evict(files: Iterable[Path]) -> str:
    """Drop files from the page cache; returns what was dropped (`data and inodes`, `data`), or `not cold: …`, why not.

    The files must be flushed, and not mapped. Inodes and folders are dropped for the entire machine, if permitted
    (root). Costs about 30 µs a file, most of it for the check.
    """
    if not hasattr(os, "posix_fadvise"):
        return f"{NOT_COLD}this system has no posix_fadvise"
    files = list(files)
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    left, total = (sum(column) for column in zip(*map(cached_pages, files), strict=True))
    if left:
        return f"{NOT_COLD}{left} of {total} pages stayed in the cache"
    try:
        with open(DROP, "w") as stream:
            stream.write("2")
    except OSError:
        return "data"
    return "data and inodes"


def cached_pages(file: Path) -> tuple[int, int]:
    """A file's number of pages in the page cache, and of all its pages. Reads none of them."""
    size = os.stat(file).st_size
    if not size:
        return 0, 0
    pages = -(-size // mmap.PAGESIZE)
    residency = (ctypes.c_ubyte * pages)()  # one byte a page; its lowest bit is set if the page is cached
    with open(file, "rb") as stream, mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        view = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), residency)
        del view  # else the map cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {file}")
    return sum(byte & 1 for byte in residency), pages


# Numbers

DATA = {"image": "JPEGs", "tokens": "tokens"}
NAMES = {"files": "small files", "webdataset by index": "tar by index", "mapped": "mapped file"}
NAMES |= {"tfrecord": "TFRecord"}
SHOWN = ["cold, in order", "warm, in order", "cold, random", "warm, random"]
IN_ORDER, WARM_IN_ORDER, AT_RANDOM = SHOWN[:3]


@formats.numbers()
def _(rows: pd.DataFrame) -> SimpleNamespace:
    """Microseconds a sample by format and case, speedups over small files, sizes on disk and times to look up."""
    cases = rows["cached"] + ", " + rows["order"].replace("sequential", "in order")
    ends = {"": "", "_p20": "_p80", "_p80": "_p20"}
    times = {f"us{end}": 1e6 / rows[f"samples_per_s{of_rate}"] for end, of_rate in ends.items()}
    single = rows.assign(case=cases, **times)
    sizes = _sizes(single[(single["kind"] == "image") & (single["case"] == IN_ORDER)])
    of_large = sizes.loc[sizes["format"] != NAMES["files"], "raw read, MB/s"]

    def us(format: str, case: str, kind: str = "image") -> Number:
        return pick(single, "us", "µs", 0, kind=kind, format=format, case=case)

    def speedup(format: str, case: str = IN_ORDER, kind: str = "image") -> Number:
        return over(us("files", case, kind), us(format, case, kind))

    def largest(*formats: str, case: str = IN_ORDER) -> Number:
        speedups = [speedup(format, case, kind) for format in formats for kind in DATA]
        absent = lacking(f"cold reads of {' or '.join(formats)}", TIMES)
        return max((number for number in speedups if number.measured), key=float, default=absent)

    return SimpleNamespace(
        times=pd.concat([_times(single, kind) for kind in DATA]),
        sizes=sizes,
        tar=speedup("webdataset by index"),
        tar_warm=speedup("webdataset by index", WARM_IN_ORDER),
        mapped=speedup("mapped"),
        largest_shards=largest("webdataset by index", "tfrecord"),
        largest_mapped=largest("mapped"),
        random_shards=largest("webdataset by index", case=AT_RANDOM),
        random_mapped=largest("mapped", case=AT_RANDOM),
        files_us=SimpleNamespace(cold=us("files", IN_ORDER), warm=us("files", WARM_IN_ORDER)),
        tar_us=SimpleNamespace(cold=us("webdataset by index", IN_ORDER), warm=us("webdataset by index", WARM_IN_ORDER)),
        library_us=SimpleNamespace(cold=us("webdataset", IN_ORDER), warm=us("webdataset", WARM_IN_ORDER)),
        least_raw=Number(of_large.min(), "", missing="raw reads", decimals=0),
        raw_mb_per_s=Number(of_large.max(), "MB/s", missing="raw reads", decimals=0),
        reader_mb_per_s=Number(sizes["reader, MB/s"].max(), "MB/s", missing="cold reads in order", decimals=0),
    )


def _times(single: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Microseconds a sample: a row for each format, a column for each case, and the speedups over small files, cold."""
    chosen = single[single["kind"] == kind]
    times = chosen.pivot(index="format", columns="case", values="us")
    times = times.reindex(index=chosen["format"].unique(), columns=SHOWN)
    files = times.reindex(index=["files"]).iloc[0]
    shown = times.rename(columns={case: f"{case}, µs" for case in SHOWN})
    shown.insert(0, "data", DATA[kind])
    shown.insert(1, "format", [NAMES.get(name, name) for name in times.index])
    for order in ("in order", "random"):
        shown[f"speedup, {order}"] = files[f"cold, {order}"] / times[f"cold, {order}"]
    return shown


def _sizes(images: pd.DataFrame) -> pd.DataFrame:
    """Of each format: files, size, build time, rate of a raw read and of the reader, times to fetch and to find."""
    return pd.DataFrame(
        {
            "format": images["format"].replace(NAMES),
            "files": images["files"],
            "disk, MB": images["bytes_allocated"] / 1e6,
            "disk / data": images["bytes_allocated"] / images["payload_bytes"],
            "build_s": images["build_s"],
            "raw read, MB/s": images["payload_bytes"] / images["raw_s"] / 1e6,
            "reader, MB/s": images["mb_per_s"],
            "subset, ms": 1e3 * images["subset_s"],
            "label, ms": 1e3 * images["find_s"],
        }
    )
