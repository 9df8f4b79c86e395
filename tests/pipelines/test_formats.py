"""Every format gives back exactly what was written, in any order, split over any number of readers."""

import pickle
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from helpers.lab import ranks as ranks_module
from helpers.lab.machine import missing_because
from helpers.pipelines.formats import FORMATS, ORDERS, Sample, Stream, collate

HERE = [name for name, module in FORMATS.items() if not missing_because(*module.NEEDS)]
few = settings(deadline=None, max_examples=20)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
labels = st.one_of(st.integers(-3, 3), st.sampled_from([-(2**63), 2**63 - 1]))
payloads = st.one_of(st.binary(max_size=2000), st.integers(0, 200_000).map(lambda size: bytes(size)))


@st.composite
def datasets(draw):
    """A kind, and samples of it."""
    kind = draw(st.sampled_from(["image", "tokens"]))
    if kind == "image":
        arrays = st.builds(np.frombuffer, payloads, st.just(np.uint8))
    else:
        dtype = draw(st.sampled_from([np.int32, np.int64, np.uint16, np.int8]))
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        arrays = st.lists(st.integers(low, high), max_size=50).map(lambda ids: np.array(ids, dtype))
    return kind, draw(st.lists(st.builds(Sample, keys, labels, arrays), min_size=1, max_size=12))


def same(actual, written):
    assert len(actual) == len(written)
    for ours, theirs in zip(actual, written, strict=True):
        assert (ours.key, ours.label, ours.data.dtype) == (theirs.key, theirs.label, theirs.data.dtype)
        assert ours.data.shape == theirs.data.shape and np.array_equal(ours.data, theirs.data)


def numbers(count, size=8):
    """Samples that tell their place."""
    return [Sample(f"n{i}", i % 5, np.full(size, i, np.int32)) for i in range(count)]


def write(name, samples, folder, kind="tokens", per_shard=None):
    sharded = {"per_shard": per_shard} if per_shard and name in ("webdataset", "tfrecord") else {}
    FORMATS[name].write(samples, folder, kind, **sharded)
    return folder


@pytest.mark.parametrize("name", HERE)
@settings(deadline=None, max_examples=6)
@given(datasets(), st.integers(1, 5))
def test_samples_come_back_as_they_were_written(name, dataset, per_shard):
    kind, samples = dataset
    with tempfile.TemporaryDirectory() as home:
        folder = write(name, samples, Path(home) / "data", kind, per_shard)
        reader = FORMATS[name].open_(folder)
        assert (len(reader), reader.kind) == (len(samples), kind)
        same(list(reader.stream()), samples)
        same([reader[place] for place in reversed(range(len(samples)))], samples[::-1])
        assert reader.labels.tolist() == [sample.label for sample in samples]
        assert list(reader.keys) == [sample.key for sample in samples]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same 53 samples in each format; shards of 10."""
    home = tmp_path_factory.mktemp("formats")
    return {name: write(name, numbers(53), home / name, per_shard=10) for name in HERE}


def test_shards_are_those_of_the_webdataset_library(folders):
    webdataset = pytest.importorskip("webdataset")
    shards = sorted(map(str, folders["webdataset"].glob("*.tar")))
    rows = webdataset.WebDataset(shards, shardshuffle=False).decode()
    actual = [Sample(row["json"]["key"], row["json"]["label"], row["npy"]) for row in rows]
    same(actual, numbers(53))


def test_records_are_those_of_the_tfrecord_library(folders):
    reader = pytest.importorskip("tfrecord.reader")
    files = sorted(folders["tfrecord"].glob("*.tfrecord"))
    indexed = [
        list(reader.tfrecord_loader(str(file), str(file.with_suffix(".tfindex")), shard=(0, 1))) for file in files
    ]
    rows = [row for rows in indexed for row in rows]
    assert [row["tokens"].tolist() for row in rows] == [sample.data.tolist() for sample in numbers(53)]
    assert [bytes(row["key"]).decode() for row in rows] == [sample.key for sample in numbers(53)]


def test_mapped_data_is_a_slice_of_the_file_and_aligned(folders):
    data = FORMATS["mapped"].open_(folders["mapped"])[3].data
    assert not data.flags.owndata and not data.flags.writeable and data.flags.aligned


@pytest.mark.parametrize("name", HERE)
def test_a_reader_finds_labels_counts_from_the_end_too_and_survives_pickle_with_open_files(name, folders):
    reader = FORMATS[name].open_(folders[name])
    assert reader.find(2).tolist() == list(range(2, 53, 5))
    same([reader[5], reader[-1]], [numbers(6)[5], numbers(53)[-1]])
    same([pickle.loads(pickle.dumps(reader))[7]], numbers(8)[7:])
    for position in (53, -54):
        with pytest.raises(IndexError):
            reader[position]


@pytest.mark.parametrize("name", ["mapped", *HERE[-1:]])
def test_files_that_are_open_before_workers_fork_serve_them_too(name, folders):
    reader = FORMATS[name].open_(folders[name])
    reader[0], reader[52]
    batches = list(DataLoader(reader, 8, num_workers=2, collate_fn=collate, shuffle=True))
    assert Counter(key for batch in batches for key in batch.keys) == Counter(sample.key for sample in numbers(53))
    assert all((batch.labels.numpy() == [int(key[1:]) % 5 for key in batch.keys]).all() for batch in batches)


@few
@given(st.sampled_from(HERE), st.sampled_from(ORDERS), st.integers(1, 3), st.integers(1, 7), st.integers(0, 2))
def test_streams_of_all_ranks_and_workers_give_every_sample_once(folders, name, order, ranks, workers, epoch):
    reader, seen = FORMATS[name].open_(folders[name]), Counter()
    for rank in range(ranks):
        stream = Stream(reader, order, seed=1, rank=rank, world_size=ranks)
        stream.set_epoch(epoch)
        actual = []
        for worker in range(workers):
            info = SimpleNamespace(id=worker, num_workers=workers)
            with patch.object(ranks_module, "get_worker_info", return_value=info):
                actual += [sample.key for sample in stream]
        assert len(actual) == len(stream)
        seen.update(actual)
    assert seen == Counter(sample.key for sample in numbers(53))


def test_epochs_differ_and_repeat_by_their_number_also_in_workers_that_persist(folders):
    stream = Stream(FORMATS["mapped"].open_(folders["mapped"]), "random")
    loader = DataLoader(stream, 8, num_workers=2, collate_fn=collate, persistent_workers=True)
    orders = []
    for epoch in (0, 1, 0):
        stream.set_epoch(epoch)
        orders.append([key for batch in loader for key in batch.keys])
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


@pytest.mark.parametrize("name", HERE)
def test_a_data_set_is_whole_or_absent(name, tmp_path):
    def broken():
        yield from numbers(3)
        raise RuntimeError("source ran dry")

    with pytest.raises(RuntimeError, match="source ran dry"):
        FORMATS[name].write(broken(), tmp_path / "data", "tokens")
    assert list(tmp_path.iterdir()) == []
    write(name, numbers(3), tmp_path / "data")
    with pytest.raises(ValueError, match="is there already"):
        write(name, numbers(3), tmp_path / "data")


@pytest.mark.parametrize(
    ("sample", "kind", "message"),
    [
        (Sample("a", 0, np.zeros(1, np.float32)), "tokens", "float32"),
        (Sample("a", 0, np.zeros((1, 1), np.int32)), "tokens", r"\(1, 1\)"),
        (Sample("a", 0, np.zeros(1, np.int32)), "image", "1-D, of bytes"),
        (Sample("a", 0, b""), "pixels", "valid: 'image', 'tokens'"),
    ],
)
def test_samples_that_no_format_can_keep_are_named(sample, kind, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        FORMATS["mapped"].write([sample], tmp_path / "data", kind)


def test_wrong_arguments_are_named(folders):
    mapped = FORMATS["mapped"]
    reader = mapped.open_(folders["mapped"])
    with pytest.raises(ValueError, match="order is 'sorted'"):
        Stream(reader, "sorted")
    with pytest.raises(ValueError, match="rank is 2; of 2 ranks the last is 1"):
        Stream(reader, rank=2, world_size=2)
