"""What is broken is named, and refused or skipped as the user chose; nothing is lost silently."""

import gzip
import io
import shutil
import struct
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from helpers.lab.machine import missing_because
from helpers.pipelines.formats import FORMATS, Fault, FormatError, Sample, Stream, collate, small_files
from helpers.pipelines.formats.table import read

HERE = [name for name, module in FORMATS.items() if not missing_because(*module.NEEDS)]
SHARDED = [name for name in HERE if name in ("webdataset", "tfrecord")]
INDEX = {"files": "labels.csv", "webdataset": "00001.index", "tfrecord": "00001.tfindex"}
COUNT = 12
HUGE = 6_300_000_000


def jpeg(number):
    stream = io.BytesIO()
    Image.new("RGB", (16, 16), (number * 20, 0, 0)).save(stream, "JPEG", comment=b"%d" % number * 50)
    return np.frombuffer(stream.getvalue(), np.uint8)


SAMPLES = [Sample(f"photo {i}", i % 3, jpeg(i)) for i in range(COUNT)]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """12 images in each format, in shards of 4."""
    home = tmp_path_factory.mktemp("whole")
    for name in HERE:
        FORMATS[name].write(SAMPLES, home / name, "image", **({"per_shard": 4} if name in SHARDED else {}))
    return home


@pytest.fixture
def copy(originals, tmp_path):
    """A copy of a format's folder, for breaking; each call a new one."""
    made = []

    def make(name):
        made.append(shutil.copytree(originals / name, tmp_path / f"{name}-{len(made)}"))
        return made[-1]

    return make


def file_with(folder, name, place):
    """The file that has a sample's data."""
    return Path(FORMATS[name].open_(folder).file_of(place))


def where(file, place):
    """Where a sample's data begins in its file."""
    return file.read_bytes().index(SAMPLES[place].data.tobytes())


def flip(file, at):
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def settled(reader):
    """Every place once, in two ways that must agree: its key, or its fault."""
    streamed = list(reader.stream())
    indexed = [reader[place] for place in range(len(reader))]
    assert [type(item) for item in streamed] == [type(item) for item in indexed]
    for one, other in zip(streamed, indexed, strict=True):
        assert one == other if isinstance(one, Fault) else one.key == other.key
    return streamed


@pytest.mark.parametrize("name", HERE)
def test_a_flipped_bit_is_named_and_costs_only_its_sample(name, copy):
    folder = copy(name)
    file = file_with(folder, name, 5)
    flip(file, where(file, 5) + 60)
    items = settled(FORMATS[name].open_(folder, faults="skip"))
    assert [place for place, item in enumerate(items) if isinstance(item, Fault)] == [5]
    assert items[5].file == str(file) and items[5].sample == 5 and "crc" in items[5].what
    with pytest.raises(FormatError, match=r"sample 5: .*crc"):
        list(FORMATS[name].open_(folder).stream())
    assert len(list(FORMATS[name].open_(folder, verify=False).stream())) == COUNT


@pytest.mark.parametrize("name", HERE)
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_anywhere_loses_only_what_is_gone_and_says_so(name, share, copy):
    folder = copy(name)
    file = file_with(folder, name, 6)
    size = file.stat().st_size
    with open(file, "r+b") as stream:
        stream.truncate(int(share * size))
    with pytest.raises(FormatError, match=file.name):
        list(FORMATS[name].open_(folder).stream())
    try:
        reader = FORMATS[name].open_(folder, faults="skip")
    except FormatError as error:
        assert name == "mapped" and error.fault.file == str(file)  # without its tables nothing can be read
        return
    items = settled(reader)
    assert len(items) == COUNT
    faults = [item for item in items if isinstance(item, Fault)]
    assert all(fault.file == str(file) and items[fault.sample] == fault for fault in faults)
    for place, item in enumerate(items):
        if isinstance(item, Sample):
            assert item.key == SAMPLES[place].key and np.array_equal(item.data, SAMPLES[place].data)
    assert name == "files" or reader.faults[0].file == str(file)  # even if it was only padding that is gone


@pytest.mark.parametrize("name", SHARDED)
def test_a_missing_index_is_refused_skipped_or_built_as_asked(name, copy, originals):
    folder = copy(name)
    (folder / INDEX[name]).unlink()
    with pytest.raises(FormatError, match=f'{INDEX[name]}: no such .*index="build" makes one'):
        FORMATS[name].open_(folder)
    reader = FORMATS[name].open_(folder, faults="skip")
    assert [fault.file for fault in reader.faults] == [str(folder / INDEX[name])]
    assert [sample.key for sample in reader.stream()] == [sample.key for sample in SAMPLES[:4] + SAMPLES[8:]]
    built = FORMATS[name].open_(folder, index="build")
    assert [sample.data.tobytes() for sample in built.stream()] == [sample.data.tobytes() for sample in SAMPLES]
    assert built.labels.tolist() == [sample.label for sample in SAMPLES]
    assert list(built.keys) == [sample.key for sample in SAMPLES]
    assert (folder / INDEX[name]).read_bytes() == (originals / name / INDEX[name]).read_bytes()
    assert len(FORMATS[name].open_(folder)) == COUNT  # it is kept


@pytest.mark.parametrize("name", SHARDED)
def test_a_shard_that_is_gone_is_named(name, copy):
    folder = copy(name)
    shard = file_with(folder, name, 5)
    shard.unlink()
    with pytest.raises(FormatError, match=f"{shard.name}: no such shard"):
        FORMATS[name].open_(folder)
    items = settled(FORMATS[name].open_(folder, faults="skip"))
    assert [isinstance(item, Fault) for item in items] == [False] * 4 + [True] * 4 + [False] * 4
    (folder / INDEX[name]).unlink()
    with pytest.raises(FormatError, match=f"{shard.name}: no such shard, though there are later ones"):
        FORMATS[name].open_(folder)
    reader = FORMATS[name].open_(folder, faults="skip")
    assert (len(reader), len(reader.faults)) == (8, 1)


def test_a_wrong_magic_number_is_named(copy):
    folder = copy("mapped")
    (folder / "samples.mapped").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(5000))
    for policy in ("refuse", "skip"):
        with pytest.raises(FormatError, match=r"samples.mapped: .*wrong magic number: it begins with b'\\x89PNG"):
            FORMATS["mapped"].open_(folder, faults=policy)


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@pytest.mark.parametrize(("name", "table"), [("mapped", "samples.mapped"), ("webdataset", "00001.index")])
def test_no_flipped_bit_of_a_table_goes_unnoticed(name, table, share, bit, copy):
    file = copy(name) / table
    raw = bytearray(file.read_bytes())
    with open(file, "rb") as stream:
        read(stream, len(raw))
        raw[int(share * stream.tell())] ^= 1 << bit
    file.write_bytes(raw)
    with pytest.raises(FormatError, match=table):
        FORMATS[name].open_(file.parent)


def test_faults_cross_from_workers_with_their_batch(copy):
    folder = copy("mapped")
    file = folder / "samples.mapped"
    for place in (2, 9):
        flip(file, where(file, place) + 3)
    reader = FORMATS["mapped"].open_(folder, faults="skip")
    batches = list(DataLoader(Stream(reader), 4, num_workers=2, collate_fn=collate))
    faults = [fault for batch in batches for fault in batch.faults]
    assert sorted(fault.sample for fault in faults) == [2, 9]
    assert sum(len(batch.keys) for batch in batches) + len(faults) == COUNT


@pytest.mark.parametrize("name", SHARDED)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(4, 7), byte=st.integers(0, 511), bit=st.integers(0, 7))
def test_what_comes_before_a_samples_data_can_be_damaged_and_nothing_is_lost_silently(name, place, byte, bit, copy):
    """A header of tar, a record's length: the library's reader may stop there, or go astray."""
    folder = copy(name)
    file = file_with(folder, name, place)
    raw = bytearray(file.read_bytes())
    at = max(where(file, place) - 1 - byte % (512 if name == "webdataset" else 40), 0)
    raw[at] ^= 1 << bit
    file.write_bytes(raw)
    items = list(FORMATS[name].open_(folder, faults="skip").stream())
    assert len(items) == COUNT
    for number, item in enumerate(items):
        if isinstance(item, Sample):
            assert item.key == SAMPLES[number].key and np.array_equal(item.data, SAMPLES[number].data)
        else:
            assert item.file == str(file) and item.sample == number


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("files", b"a,b\r\n1,2\r\n"),
        ("files", b'"file","label","key","bytes","crc32"\r\n'),
        ("files", b"file,label,key,bytes,crc32\r\n0/a.jpg,1,a,1,-1\r\n"),
        ("webdataset", b"{"),
        ("tfrecord", b"0 one\n"),
        ("tfrecord", b""),
    ],
)
def test_an_index_that_is_none_is_named(name, content, copy):
    if name not in HERE:
        pytest.skip(f"{name} is not installed")
    folder = copy(name)
    (folder / INDEX[name]).write_bytes(content)
    with pytest.raises(FormatError, match=INDEX[name]):
        FORMATS[name].open_(folder)


@pytest.mark.parametrize("name", HERE)
def test_an_empty_folder_is_refused_by_name(name, tmp_path):
    for policy in ("refuse", "skip"):
        with pytest.raises(FormatError, match=str(tmp_path)):
            FORMATS[name].open_(tmp_path, faults=policy)


def write_table(folder, *rows):
    lines = [",".join(small_files.COLUMNS), *(",".join(map(str, row)) for row in rows)]
    (folder / small_files.TABLE).write_text("\r\n".join(lines) + "\r\n", encoding="utf-8-sig")


@pytest.mark.parametrize("name", ["../secret.jpg", "{}/secret.jpg", "0/../../secret.jpg"])
def test_the_table_of_small_files_reads_nothing_outside_of_its_folder(name, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    write_table(tmp_path / "data", (name.format(tmp_path), 0, "key", 6, 0))
    [fault] = small_files.open_(tmp_path / "data", faults="skip", verify=False).stream()
    assert "outside of the data set's folder" in fault.what


def write_tar(file, **contents):
    with tarfile.open(file, "w") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(
    "members",
    [
        {"a.jpg": b"", "a.json": b"[1, 2]"},
        {"a.jpg": b"", "a.json": b'{"label": 1.5, "key": "a"}'},
        {"a.jpg": b"", "a.png": b"", "a.json": b'{"label": 1, "key": "a"}'},
    ],
)
def test_a_tar_of_other_members_is_refused_by_name(members, tmp_path):
    write_tar(tmp_path / "00000.tar", **members)
    with pytest.raises(FormatError, match=r"00000\.tar: 'a' is no sample: expected one member \.jpg, .* and a \.json"):
        FORMATS["webdataset"].open_(tmp_path, index="build")


def unpacks_to_much(folder):
    with gzip.open(folder / "00000.tar", "wb", compresslevel=1) as stream:
        stream.write(bytes(50_000_000))


def claims_much(folder):
    member = tarfile.TarInfo("a.jpg")
    member.size = HUGE
    (folder / "00000.tar").write_bytes(member.tobuf() + bytes(1536))


@pytest.mark.parametrize("make", [unpacks_to_much, claims_much])
def test_a_tar_that_is_small_but_pretends_to_be_large_is_refused_and_takes_no_memory(make, tmp_path):
    make(tmp_path)
    tracemalloc.start()
    with pytest.raises(FormatError, match=r"00000\.tar: truncated or damaged"):
        FORMATS["webdataset"].open_(tmp_path, index="build")
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


@pytest.mark.skipif("webdataset" not in HERE, reason="webdataset is not installed")
def test_a_folder_that_is_called_like_a_command_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    FORMATS["webdataset"].write([Sample("a", 1, b"data")], "pipe:touch ran;#", "image")
    assert [sample.key for sample in FORMATS["webdataset"].open_("pipe:touch ran;#").stream()] == ["a"]
    assert [file.name for file in tmp_path.iterdir()] == ["pipe:touch ran;#"]


def frame(record, length=None):
    masked = pytest.importorskip("tfrecord.writer").TFRecordWriter.masked_crc
    head = struct.pack("<Q", len(record) if length is None else length)
    return head + masked(head) + record + masked(record)


def example(**features):
    made = pytest.importorskip("tfrecord.example_pb2").Example()
    for name, values in features.items():
        feature = made.features.feature[name]
        (feature.int64_list if isinstance(values[0], int) else feature.bytes_list).value.extend(values)
    return made.SerializeToString()


OK = {"key": [b"ok"], "label": [5], "image": [b"data"]}


@pytest.mark.parametrize(
    "features",
    [
        {"image": [b"x" * 100_000] + [b""] * 10_000},  # as a table of equal rows: 1 GB
        {"label": [1, 2]},
        {"key": [b"\xff"]},
        {"image": []},
        {"image": [], "tokens": [1], "dtype": [b"O"]},
    ],
    ids=lambda features: " ".join(features),
)
def test_a_record_of_odd_features_is_named_and_costs_only_its_sample(features, tmp_path):
    odd = {name: values for name, values in (OK | features).items() if values}
    (tmp_path / "00000.tfrecord").write_bytes(frame(example(**odd)) + frame(example(**OK)))
    with pytest.raises(FormatError, match=r"00000\.tfrecord, sample 0: not a sample of ours"):
        list(FORMATS["tfrecord"].open_(tmp_path, index="build").stream())
    reader = FORMATS["tfrecord"].open_(tmp_path, faults="skip")
    assert [type(item) for item in reader.stream()] == [Fault, Sample]
    assert reader.labels.tolist() == [-(2**63), 5] and reader.keys == ["", "ok"]


@pytest.mark.parametrize("verify", [False, True])
def test_a_record_that_claims_to_be_huge_takes_no_memory(verify, tmp_path):
    good = frame(example(**OK))
    (tmp_path / "00000.tfrecord").write_bytes(good + frame(example(**OK), HUGE))
    with pytest.raises(FormatError, match="truncated or damaged: its records end at byte 6"):
        FORMATS["tfrecord"].open_(tmp_path, index="build")
    (tmp_path / "00000.tfindex").write_text(f"0 {len(good)}\n{len(good)} {HUGE + 16}\n")  # it agrees with the record
    tracemalloc.start()
    items = list(FORMATS["tfrecord"].open_(tmp_path, faults="skip", verify=verify).stream())
    assert [type(item) for item in items] == [Sample, Fault] and "truncated" in items[1].what
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()
