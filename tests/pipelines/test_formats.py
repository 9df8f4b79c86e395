"""Every format gives back exactly what was written, in any order; what is broken is refused by name."""

import itertools
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from helpers.lab.machine import missing_because
from helpers.pipelines import FORMATS, FormatError, Sample

HERE = [name for name, format in FORMATS.items() if not missing_because(*format.needs)]
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


@pytest.mark.parametrize("name", ["mapped", "webdataset"])
def test_files_that_are_open_before_workers_fork_serve_them_too(name, folders):
    reader = FORMATS[name].open_(folders[name])
    reader[0], reader[52]
    batches = DataLoader(reader, 8, num_workers=2, collate_fn=list, shuffle=True)
    same(sorted(itertools.chain(*batches), key=lambda sample: int(sample.key[1:])), numbers(53))


def flip(file, at):
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize("name", [name for name in HERE if name != "tfrecord"])  # its library verifies no checksum
def test_a_flipped_bit_is_named(name, tmp_path):
    samples = [Sample(f"photo {i}", i % 3, np.full(60, i, np.uint8)) for i in range(12)]
    folder = write(name, samples, tmp_path / "data", "image", 4)
    file = Path(FORMATS[name].open_(folder).file_of(5))
    flip(file, file.read_bytes().index(samples[5].data.tobytes()) + 30)
    reader, named = FORMATS[name].open_(folder), f"{file}, sample 5: .*crc"
    with pytest.raises(FormatError, match=named):
        list(reader.stream())
    with pytest.raises(FormatError, match=named):
        reader[5]
    assert reader[6].key == "photo 6"
    assert len(list(FORMATS[name].open_(folder, verify=False).stream())) == 12


@pytest.mark.parametrize("name", ["mapped", "webdataset"])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_file_that_is_cut_is_named(name, share, tmp_path):
    folder = write(name, numbers(12, 1000), tmp_path / "data", per_shard=12)
    file = Path(FORMATS[name].open_(folder).file_of(6))
    os.truncate(file, int(share * file.stat().st_size))
    with pytest.raises(FormatError, match=str(folder)):
        list(FORMATS[name].open_(folder).stream())


def test_a_missing_index_is_built(folders, tmp_path):
    folder = shutil.copytree(folders["webdataset"], tmp_path / "data")
    (folder / "00001.index").unlink()
    same(list(FORMATS["webdataset"].open_(folder).stream()), numbers(53))
    assert (folder / "00001.index").read_bytes() == (folders["webdataset"] / "00001.index").read_bytes()


@pytest.mark.parametrize("name", HERE)
def test_what_is_no_data_set_is_refused_by_name(name, tmp_path):
    for file in ("labels.csv", "samples.mapped", "00000.tar", "00000.index"):
        with pytest.raises(FormatError, match=str(tmp_path)):
            FORMATS[name].open_(tmp_path)
        (tmp_path / file).write_bytes(b"a,b\r\n1,2\r\n")
