"""Shards and folders that others made: any names are read; what would do harm is a named fault.

A hostile file takes no memory, runs nothing and reads nothing else.
"""

import errno
import io
import json
import struct
import tarfile
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers.pipelines.formats import Fault, FormatError, Sample, small_files, table, tfrecord, webdataset

GOOD = {"ok.jpg": b"not decoded", "ok.cls": b"5"}
HUGE = 6_300_000_000


def picture(number, kind="JPEG"):
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (number * 20, 0, 0)).save(stream, kind)
    return stream.getvalue()


JPEGS, PNGS = [picture(number) for number in range(4)], [picture(number, "PNG") for number in range(4)]


def member(name, content=b"", **fields):
    made = tarfile.TarInfo(name)
    made.size = len(content)
    for field, value in fields.items():
        setattr(made, field, value)
    return made, content


def write_tar(file, *members, format=tarfile.GNU_FORMAT, **contents):
    with tarfile.open(file, "w", format=format) as tar:
        for made, content in [*members, *(member(name, content) for name, content in contents.items())]:
            tar.addfile(made, io.BytesIO(content) if content else None)


def build(folder, **options):
    return webdataset.open_(folder, index="build", **options)


def content(reader):
    """Key -> label and data, in both orders of reading, which must agree."""
    streamed = {sample.key: (sample.label, sample.data.tobytes()) for sample in reader.stream()}
    by_position = [reader[position] for position in range(len(reader))]
    assert streamed == {sample.key: (sample.label, sample.data.tobytes()) for sample in by_position}
    return streamed


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"v1.0/a.jpg": JPEGS[1], "v1.0/a.cls": b"1", "p.JPEG": JPEGS[3], "p.cls": b"3\n"}, {"v1.0/a": 1, "p": 3}),
        ({"a.png": PNGS[1], "a.cls": b"1", "b.jpg": JPEGS[2], "b.png": PNGS[0], "b.cls": b"2"}, {"a": 1, "b": 2}),
        ({"a.jpg": JPEGS[0], "README": b"none", "._a.jpg": b"none", "a.cls": b"0"}, {"a": 0}),
    ],
    ids=["folders and capitals", "a PNG, and a mask", "other files"],
)
def test_shards_of_any_names_are_read(members, expected, library, tmp_path):
    if library:
        pytest.importorskip("webdataset")
    write_tar(tmp_path / "train-1.tar", **members)
    images = {data for name, data in members.items() if not name.endswith("cls")}
    for reader in (build(tmp_path, library=library, check_image=True), webdataset.open_(tmp_path, library=library)):
        assert {key: label for key, (label, _) in content(reader).items()} == expected
        assert all(data in images for _, data in content(reader).values())


@pytest.mark.parametrize("module", [small_files, webdataset])
def test_a_png_is_written_under_its_suffix(module, tmp_path):
    if module.NEEDS:
        pytest.importorskip("webdataset")
    module.write([Sample("a", 1, PNGS[1]), Sample("b", 2, JPEGS[2])], tmp_path / "data", "image")
    assert content(module.open_(tmp_path / "data")) == {"a": (1, PNGS[1]), "b": (2, JPEGS[2])}
    names = [file.name for file in sorted(tmp_path.glob("data/*/*"))]
    if module is webdataset:
        with tarfile.open(tmp_path / "data" / "00000.tar") as tar:
            names = [name for name in tar.getnames() if not name.endswith(".json")]
    assert names == ["00000000.png", "00000001.jpg"]


@pytest.mark.parametrize("name", ["00001.tar.gz", "00001.tgz", "00001.tar.zst"])
def test_a_compressed_shard_is_refused_or_a_fault_unless_its_tar_is_there(name, tmp_path):
    for number in range(3):
        write_tar(tmp_path / f"0000{number}.tar", **{f"{number}.jpg": JPEGS[0], f"{number}.cls": b"1"})
    (tmp_path / name).write_bytes(b"")
    assert len(build(tmp_path)) == 3
    (tmp_path / "00001.tar").unlink()
    (tmp_path / "00001.index").unlink()
    with pytest.raises(FormatError, match=rf"{name}: compressed, .*decompress it to \*\.tar"):
        build(tmp_path)
    reader = build(tmp_path, faults="skip")
    assert [fault.file for fault in reader.faults] == [str(tmp_path / name)]
    assert [sample.key for sample in reader.stream()] == ["0", "2"]


@pytest.mark.parametrize(("module", "name"), [(webdataset, "a.tar.gz"), (tfrecord, "a.tfrecord.gz")])
def test_a_folder_of_compressed_shards_alone_says_so(module, name, tmp_path):
    (tmp_path / name).write_bytes(b"")
    for policy in ("refuse", "skip"):
        with pytest.raises(FormatError, match=rf"{name}: compressed"):
            module.open_(tmp_path, index="build", faults=policy)


@pytest.mark.parametrize(
    ("label_from", "label"), [(None, 1), ("cls", 1), ("class.txt", 2), ("json", 3), ("json.label", 3), ("json.id", 4)]
)
def test_the_label_is_read_from_where_it_is_said_to_be(label_from, label, tmp_path):
    about = json.dumps({"label": 3, "id": 4}).encode()
    write_tar(tmp_path / "x.tar", **{"a.jpg": JPEGS[0], "a.cls": b"1", "a.class.txt": b" 2\n", "a.json": about})
    assert build(tmp_path, label_from=label_from)[0].label == label
    with pytest.raises(FormatError, match=r"labels are from .*delete it"):
        webdataset.open_(tmp_path, label_from="other")
    assert webdataset.open_(tmp_path)[0].label == label


@pytest.mark.parametrize(
    ("members", "label_from", "reason"),
    [
        ({}, None, r"has no label: no \.cls or \.json; label_from= names another"),
        ({"txt": b"a dog"}, "cls", r"has no label: no \.cls"),
        ({"txt": b"a dog"}, "txt", r"has no label in \.txt \(ValueError"),
        ({"json": b"{}"}, None, r"has no label in \.json \(KeyError: 'label'\); label_from= names another"),
        ({"json": b"[1, 2]"}, None, r"has no label in \.json \(TypeError"),
        ({"json": b'{"a": ' + b"[" * 200_000}, None, r"has no label in \.json \(RecursionError"),
        ({"json": b'{"label": 1.5}'}, None, "no 64-bit integer"),
        ({"cls": b"9" * 30}, None, "no 64-bit integer"),
        ({"jpeg": JPEGS[1], "cls": b"1"}, None, "has 2 members of .jpg, .jpeg, .npy, .png"),
    ],
)
def test_a_sample_without_a_label_is_named_and_the_others_are_read(members, label_from, reason, tmp_path):
    bad = {"a.jpg": JPEGS[0], **{f"a.{suffix}": data for suffix, data in members.items()}}
    write_tar(tmp_path / "x.tar", **bad, **GOOD | {"ok.txt": b"5"})
    with pytest.raises(FormatError, match=rf"x\.tar: sample 'a' .*{reason}"):
        build(tmp_path, label_from=label_from)
    reader = build(tmp_path, label_from=label_from, faults="skip")
    assert [fault.file for fault in reader.faults] == [str(tmp_path / "x.tar")]
    assert [sample.key for sample in reader.stream()] == ["ok"]
    assert not list(tmp_path.glob("*.index"))  # of a shard with faults none is saved


def test_shards_in_a_folder_that_is_read_only_are_read(tmp_path, monkeypatch):
    def refuse(path, content):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("helpers.lab.files.write", refuse)
    write_tar(tmp_path / "a.tar", **GOOD)
    assert content(build(tmp_path)) == {"ok": (5, GOOD["ok.jpg"])} and not list(tmp_path.glob("*.index"))


def test_shards_of_pictures_and_of_tokens_are_no_data_set(tmp_path):
    stream = io.BytesIO()
    np.save(stream, np.arange(3))
    write_tar(tmp_path / "a.tar", **GOOD)
    write_tar(tmp_path / "b.tar", **{"b.npy": stream.getvalue(), "b.cls": b"1"})
    with pytest.raises(FormatError, match="has shards of image and of tokens"):
        build(tmp_path)


def claiming(name, size, kind=tarfile.REGTYPE):
    """A member whose header claims a size, in the notation of sizes that eight octal digits cannot hold."""
    header = bytearray(member(name, type=kind)[0].tobuf(tarfile.GNU_FORMAT))
    digits = (size + (256**11 if size < 0 else 0)).to_bytes(11, "big")
    header[124:136] = digits.rjust(12, b"\xff" if size < 0 else b"\x80")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


SPARSE = {
    "GNU.sparse.major": "1",
    "GNU.sparse.minor": "0",
    "GNU.sparse.name": "a.jpg",
    "GNU.sparse.realsize": f"{HUGE}",
}
HOSTILE = {
    "hard link to itself": ([member("a.jpg", type=tarfile.LNKTYPE, linkname="a.jpg")], "is a link"),
    "symbolic link": ([member("a.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")], "is a link"),
    "sparse": ([member("a.jpg", b"0\n".ljust(512, b"\0"), pax_headers=SPARSE)], "or a sparse file"),
    "twice": ([member("a.jpg", b"data"), member("a.jpg", b"data")], "is there twice"),
    "name that is no text": ([member("\udcff.jpg", b"data"), member("\udcff.cls", b"1")], "sample"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_member_of_a_tar_is_named_and_costs_only_its_sample(name, tmp_path):
    members, reason = HOSTILE[name]
    write_tar(tmp_path / "x.tar", *members, member("a.cls", b"1"), format=tarfile.PAX_FORMAT, **GOOD)
    tracemalloc.start()
    with pytest.raises(FormatError, match=rf"x\.tar: .*{reason}"):
        build(tmp_path)
    reader = build(tmp_path, faults="skip")
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    assert [(sample.key, sample.label) for sample in reader.stream()] == [("ok", 5)]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (claiming("a.jpg", HUGE), f"{HUGE} bytes, beyond the end"),
        (claiming("a.jpg", -512), "has -512 bytes"),
        (claiming("././@LongLink", HUGE, tarfile.GNUTYPE_LONGNAME), "a header of"),
        (tarfile.TarInfo.create_pax_global_header({"a": "b"}) * 2000, "recursion"),
        (b"x" * 512, "no end mark"),
    ],
)
def test_a_header_that_claims_any_size_is_a_fault_of_its_file_at_once(header, reason, tmp_path):
    write_tar(tmp_path / "x.tar", **GOOD)
    end = (tmp_path / "x.tar").read_bytes().rstrip(b"\0")
    end = end.ljust(-(-len(end) // 512) * 512, b"\0")
    (tmp_path / "x.tar").write_bytes(end + header + b"data".ljust(512, b"\0") + bytes(1024))
    with pytest.raises(FormatError, match=rf"x\.tar: truncated or damaged \(.*{reason}"):
        build(tmp_path)
    reader = build(tmp_path, faults="skip")
    assert len(reader.faults) == 1 and [sample.key for sample in reader.stream()] == ["ok"]


changes = st.tuples(
    st.integers(0, 3071), st.binary(min_size=1, max_size=12) | st.sampled_from([b"\xff" * 12, b"L", b"x"])
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(changes, min_size=1, max_size=3))
def test_a_tar_with_any_bytes_is_read_or_named(changes, tmp_path):
    write_tar(tmp_path / "x.tar", format=tarfile.PAX_FORMAT, **GOOD)
    raw = bytearray((tmp_path / "x.tar").read_bytes())
    for at, written in changes:
        raw[at : at + len(written)] = written
    for at in range(0, 3072, 512):  # headers with right checksums
        raw[at + 148 : at + 156] = b" " * 8
        raw[at + 148 : at + 156] = b"%06o\0 " % sum(raw[at : at + 512])
    (tmp_path / "x.tar").write_bytes(raw)
    (tmp_path / "x.index").unlink(missing_ok=True)
    try:
        assert [type(item) for item in build(tmp_path, faults="skip").stream()] == [Sample]
    except FormatError as error:
        assert "x.tar" in str(error)


@pytest.mark.parametrize(
    ("about", "row", "reason"),
    [
        ({}, (0, 2**62, 5, 0, 2), "outside of the data"),
        ({}, (-1, 4, 5, 0, 2), "outside of the data"),
        ({}, (0, 4, 5, 0, 2**31), "keys of other sizes"),
        ({"kind": "audio"}, (0, 4, 5, 0, 2), "of kind 'audio'"),
        ({"bytes": "many"}, (0, 4, 5, 0, 2), "lacks a part"),
    ],
)
def test_an_index_that_lies_about_its_shard_is_a_fault(about, row, reason, tmp_path):
    for name in "xy":
        write_tar(tmp_path / f"{name}.tar", **GOOD)
    build(tmp_path)
    size = (tmp_path / "x.tar").stat().st_size
    lies = table.Table({"kind": "image", "bytes": size} | about, np.array([row], table.ROW), b"ok")
    (tmp_path / "x.index").write_bytes(table.pack(lies))
    with pytest.raises(FormatError, match=rf"x\.index: .*{reason}"):
        webdataset.open_(tmp_path)
    reader = webdataset.open_(tmp_path, faults="skip")
    assert len(reader.faults) == 1 and [sample.key for sample in reader.stream()] == ["ok"]


@pytest.mark.parametrize("library", [False, True])
def test_a_folder_that_is_called_like_a_command_runs_nothing(library, tmp_path, monkeypatch):
    pytest.importorskip("webdataset")
    monkeypatch.chdir(tmp_path)
    webdataset.write([Sample("a", 1, b"data")], "pipe:touch ran;#", "image")
    assert [sample.key for sample in webdataset.open_("pipe:touch ran;#", library=library).stream()] == ["a"]
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
        {"image": [b"x" * 1_000_000] + [b""] * 100_000},  # as a table of equal rows: 100 GB
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
        list(tfrecord.open_(tmp_path, index="build").stream())
    reader = tfrecord.open_(tmp_path, faults="skip")
    assert [type(item) for item in reader.stream()] == [Fault, Sample]
    assert reader.labels.tolist() == [tfrecord.UNKNOWN, 5] and reader.keys == ["", "ok"]


@pytest.mark.parametrize("verify", [False, True])
def test_a_record_that_claims_to_be_huge_takes_no_memory(verify, tmp_path):
    good = frame(example(**OK))
    (tmp_path / "00000.tfrecord").write_bytes(good + frame(example(**OK), HUGE))
    with pytest.raises(FormatError, match=rf"truncated or damaged \(no whole record at byte {len(good)}\)"):
        tfrecord.open_(tmp_path, index="build")
    (tmp_path / "00000.tfindex").write_text(f"0 {len(good)}\n{len(good)} {HUGE + 16}\n")  # it agrees with the record
    tracemalloc.start()
    items = list(tfrecord.open_(tmp_path, faults="skip", verify=verify).stream())
    assert [type(item) for item in items] == [Sample, Fault] and "truncated" in items[1].what
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()
