"""Shards and folders that others made: any names are read; what would do harm is a named fault.

A hostile file takes no memory, runs nothing and reads nothing else.
"""

import errno
import io
import struct
import tarfile
import tracemalloc

import numpy as np
import pytest
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
        ({"a.png": PNGS[1], "a.cls": b"1", "b.jpg": JPEGS[2], "b.cls": b"2"}, {"a": 1, "b": 2}),
        ({"a.jpg": JPEGS[0], "README": b"none", "._a.jpg": b"none", "a.cls": b"0"}, {"a": 0}),
    ],
    ids=["folders and capitals", "a PNG", "other files"],
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
    ("members", "reason"),
    [
        ({}, r"has no label: no \.cls or \.json"),
        ({"cls": b"a dog"}, r"has no label in \.cls \(JSONDecodeError"),
        ({"json": b"{}"}, r"has no label in \.json \(KeyError: 'label'\)"),
        ({"json": b"[1, 2]"}, r"has no label in \.json \(TypeError"),
        ({"json": b'{"label": 1.5}'}, "no 64-bit integer"),
        ({"cls": b"9" * 30}, "no 64-bit integer"),
        ({"jpeg": JPEGS[1], "cls": b"1"}, "has 2 members of .jpg, .jpeg, .npy, .png"),
    ],
)
def test_a_sample_without_a_label_is_named_and_the_others_are_read(members, reason, tmp_path):
    bad = {"a.jpg": JPEGS[0], **{f"a.{suffix}": data for suffix, data in members.items()}}
    write_tar(tmp_path / "x.tar", **bad, **GOOD)
    with pytest.raises(FormatError, match=rf"x\.tar: sample 'a' .*{reason}"):
        build(tmp_path)
    reader = build(tmp_path, faults="skip")
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


def test_a_member_that_claims_more_bytes_than_the_file_has_is_a_fault_of_its_file(tmp_path):
    claiming = member("a.jpg")[0]
    claiming.size = 6_300_000_000
    write_tar(tmp_path / "x.tar", **GOOD)
    end = (tmp_path / "x.tar").read_bytes().rstrip(b"\0")
    end = end.ljust(-(-len(end) // 512) * 512, b"\0")
    (tmp_path / "x.tar").write_bytes(end + claiming.tobuf(tarfile.GNU_FORMAT) + bytes(1536))
    with pytest.raises(FormatError, match=r"x\.tar: truncated or damaged \(.*beyond the end"):
        build(tmp_path)
    reader = build(tmp_path, faults="skip")
    assert len(reader.faults) == 1 and [sample.key for sample in reader.stream()] == ["ok"]


def test_a_link_in_a_tar_is_not_read(tmp_path):
    link = member("a.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")
    write_tar(tmp_path / "x.tar", link, member("a.cls", b"1"), **GOOD)
    with pytest.raises(FormatError, match=r"sample 'a' has no members of"):
        build(tmp_path)


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
