"""What is broken is refused by name; nothing is lost silently."""

import io
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from helpers.lab.machine import missing_because
from helpers.pipelines.formats import FORMATS, FormatError, Sample, Stream, collate
from helpers.pipelines.formats.table import read

HERE = [name for name, module in FORMATS.items() if not missing_because(*module.NEEDS)]
SHARDED = [name for name in HERE if name in ("webdataset", "tfrecord")]
SUMMED = [name for name in HERE if name != "tfrecord"]  # its library verifies no checksum
INDEX = {"files": "labels.csv", "webdataset": "00001.index", "tfrecord": "00001.tfindex"}
COUNT = 12


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


@pytest.mark.parametrize("name", SUMMED)
def test_a_flipped_bit_is_named(name, copy):
    folder = copy(name)
    file = file_with(folder, name, 5)
    flip(file, where(file, 5) + 60)
    reader = FORMATS[name].open_(folder)
    named = f"{file}, sample 5: .*crc"
    with pytest.raises(FormatError, match=named):
        list(reader.stream())
    with pytest.raises(FormatError, match=named):
        reader[5]
    assert reader[6].key == "photo 6"
    assert len(list(FORMATS[name].open_(folder, verify=False).stream())) == COUNT


@pytest.mark.long
@pytest.mark.skipif("tfrecord" not in HERE, reason="tfrecord is not installed")
@pytest.mark.parametrize("byte", range(8))  # of the first record's length
def test_a_record_that_the_library_cannot_read_is_named(byte, copy):
    file = file_with(copy("tfrecord"), "tfrecord", 4)
    flip(file, byte)
    with pytest.raises(FormatError, match=f"{file}, sample 4: the tfrecord library can't read it"):
        FORMATS["tfrecord"].open_(file.parent)[4]


@pytest.mark.parametrize("name", HERE)
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_anywhere_is_named(name, share, copy):
    folder = copy(name)
    file = file_with(folder, name, 6)
    size = file.stat().st_size
    with open(file, "r+b") as stream:
        stream.truncate(int(share * size))
    with pytest.raises(FormatError, match=file.name):
        list(FORMATS[name].open_(folder).stream())


@pytest.mark.skipif("webdataset" not in HERE, reason="webdataset is not installed")
def test_a_missing_index_is_refused_or_built_as_asked(copy, originals):
    folder, open_ = copy("webdataset"), FORMATS["webdataset"].open_
    (folder / "00001.index").unlink()
    with pytest.raises(FormatError, match=r"00001\.index: .*No such file"):
        open_(folder)
    built = open_(folder, index="build")
    assert [sample.data.tobytes() for sample in built.stream()] == [sample.data.tobytes() for sample in SAMPLES]
    assert built.labels.tolist() == [sample.label for sample in SAMPLES]
    assert list(built.keys) == [sample.key for sample in SAMPLES]
    assert (folder / "00001.index").read_bytes() == (originals / "webdataset" / "00001.index").read_bytes()
    assert len(open_(folder)) == COUNT  # it is kept


@pytest.mark.parametrize("name", SHARDED)
def test_a_shard_that_is_gone_is_named(name, copy):
    folder = copy(name)
    shard = file_with(folder, name, 5)
    shard.unlink()
    with pytest.raises(FormatError, match=f"{shard.name}: .*No such file"):
        FORMATS[name].open_(folder)


def test_a_wrong_magic_number_is_named(copy):
    folder = copy("mapped")
    (folder / "samples.mapped").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(5000))
    with pytest.raises(FormatError, match=r"samples.mapped: .*wrong magic number: it begins with b'\\x89PNG"):
        FORMATS["mapped"].open_(folder)


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


def test_an_error_crosses_from_a_worker(copy):
    folder = copy("mapped")
    file = folder / "samples.mapped"
    flip(file, where(file, 9) + 3)
    with pytest.raises(FormatError, match="sample 9: "):
        list(DataLoader(Stream(FORMATS["mapped"].open_(folder)), 4, num_workers=2, collate_fn=collate))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("files", b"a,b\r\n1,2\r\n"),
        ("files", b'"file","label","key","bytes","crc32"\r\n'),
        ("files", b"file,label,key,bytes,crc32\r\n0/a.jpg,1,a,1,-1\r\n"),
        ("webdataset", b"{"),
        ("tfrecord", b"0 one\n"),
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
    with pytest.raises(FormatError, match=str(tmp_path)):
        FORMATS[name].open_(tmp_path)


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
        {"a.jpg": b"", "a.npy": b"", "a.json": b'{"label": 1, "key": "a"}'},
    ],
)
def test_a_tar_of_other_members_is_refused_by_name(members, tmp_path):
    write_tar(tmp_path / "00000.tar", **members)
    with pytest.raises(FormatError, match=r"00000\.tar: 'a' is no sample: expected one member \.jpg, .* and a \.json"):
        FORMATS["webdataset"].open_(tmp_path, index="build")


@pytest.mark.skipif("webdataset" not in HERE, reason="webdataset is not installed")
def test_a_folder_that_is_called_like_a_command_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    FORMATS["webdataset"].write([Sample("a", 1, b"data")], "pipe:touch ran;#", "image")
    assert [sample.key for sample in FORMATS["webdataset"].open_("pipe:touch ran;#").stream()] == ["a"]
    assert [file.name for file in tmp_path.iterdir()] == ["pipe:touch ran;#"]
