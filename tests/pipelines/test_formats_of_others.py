"""Tar shards that others wrote: any names, a JPEG beside its label, keys as the webdataset library has them."""

import errno
import io
import json
import tarfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from helpers.pipelines.formats import FormatError, Sample, decode, files, tfrecord, webdataset
from helpers.pipelines.formats.webdataset import _split


def jpeg(number):
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (number * 20, 0, 0)).save(stream, "JPEG", comment=b"%d" % number * (number + 1))
    return stream.getvalue()


def png(number):
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (number * 20, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def write_tar(file, members):
    file.parent.mkdir(exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def build(folder, **options):
    return webdataset.open_(folder, index="build", **options)


def read(reader):
    """Key -> label and content, in both orders of reading, which must agree."""
    streamed = {sample.key: (sample.label, sample.data.tobytes()) for sample in reader.stream()}
    assert streamed == {
        sample.key: (sample.label, sample.data.tobytes()) for sample in map(reader.__getitem__, range(len(reader)))
    }
    return streamed


names = st.text("ab._", min_size=1, max_size=5).filter(lambda name: name[0] != "." and name[-1] != "." and "." in name)


@given(st.lists(st.sampled_from(["v1.0", "a", "b.c"]), max_size=2), names)
def test_a_members_name_is_split_as_the_library_splits_it(folders, name):
    library = pytest.importorskip("webdataset.tariterators")
    path = "/".join([*folders, name])
    key, suffix = library.base_plus_ext(path)
    assert _split(path) == (key, suffix.lower())


def test_a_dot_in_a_folders_name_loses_no_sample(tmp_path):
    library = pytest.importorskip("webdataset")
    members = {
        "v1.0/a.jpg": jpeg(1),
        "v1.0/a.cls": b"1",
        "v1.0/b.jpg": jpeg(2),
        "v1.0/b.cls": b"2",
        "p.jpg": jpeg(3),
        "p.cls": b"3",
    }
    write_tar(tmp_path / "data" / "00000.tar", members)
    reader = build(tmp_path / "data")
    assert read(reader) == {"v1.0/a": (1, jpeg(1)), "v1.0/b": (2, jpeg(2)), "p": (3, jpeg(3))}
    rows = library.WebDataset([str(tmp_path / "data" / "00000.tar")], shardshuffle=False)
    assert list(reader.keys) == [row["__key__"] for row in rows]


@pytest.mark.parametrize("library", [False, True])
def test_shards_of_any_names_with_a_jpeg_and_a_cls_are_read(library, tmp_path):
    if library:
        pytest.importorskip("webdataset")
    for shard in range(2):
        members = {}
        for number in range(3):
            members[f"n{shard}/img_{number}.JPEG"] = jpeg(number)
            members[f"n{shard}/img_{number}.cls"] = b"%d\n" % (10 * shard + number)
        write_tar(tmp_path / "data" / f"train-{shard:06d}.tar", members)
    expected = {
        f"n{shard}/img_{number}": (10 * shard + number, jpeg(number)) for shard in range(2) for number in range(3)
    }
    assert read(build(tmp_path / "data", library=library)) == expected
    assert read(webdataset.open_(tmp_path / "data", library=library)) == expected  # the indexes were kept


@pytest.mark.parametrize("library", [False, True])
def test_png_samples_are_read_and_a_png_beside_a_jpeg_is_no_second_image(library, tmp_path):
    if library:
        pytest.importorskip("webdataset")
    members = {"a.png": png(1), "a.cls": b"1", "b.jpg": jpeg(2), "b.png": png(0), "b.cls": b"2"}
    write_tar(tmp_path / "data" / "x.tar", members)
    reader = build(tmp_path / "data", library=library, check_image=True)
    assert read(reader) == {"a": (1, png(1)), "b": (2, jpeg(2))}
    assert decode(reader[0].data).shape == (8, 8, 3)


@pytest.mark.parametrize("module", [files, webdataset])
def test_a_png_is_written_under_its_suffix(module, tmp_path):
    if module.NEEDS:
        pytest.importorskip("webdataset")
    module.write([Sample("a", 1, png(1)), Sample("b", 2, jpeg(2))], tmp_path / "data", "image")
    reader = module.open_(tmp_path / "data")
    assert [sample.data.tobytes() for sample in reader.stream()] == [png(1), jpeg(2)]
    names = [file.suffix for file in sorted(tmp_path.glob("data/*/*"))]
    if module is webdataset:
        with tarfile.open(tmp_path / "data" / "00000.tar") as tar:
            names = [f".{name.rpartition('.')[2]}" for name in tar.getnames() if not name.endswith(".json")]
    assert names == [".png", ".jpg"]


def test_png_files_in_folders_are_read(tmp_path):
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "a.png").write_bytes(png(1))
    reader = files.open_(tmp_path, index="build", check_image=True)
    assert [(sample.label, sample.data.tobytes()) for sample in reader.stream()] == [(3, png(1))]


@pytest.mark.parametrize("name", ["00001.tar.gz", "00001.tgz", "00001.tar.zst"])
def test_a_compressed_shard_is_refused_or_a_fault_unless_its_tar_is_there(name, tmp_path):
    for shard in ("00000", "00001", "00002"):
        write_tar(tmp_path / f"{shard}.tar", {f"{shard}.jpg": jpeg(0), f"{shard}.cls": b"1"})
    (tmp_path / name).write_bytes(b"")
    assert len(build(tmp_path)) == 3
    (tmp_path / "00001.tar").unlink()
    (tmp_path / "00001.idx.npz").unlink()
    with pytest.raises(FormatError, match=rf"{name}: compressed, .*decompress it to \*\.tar"):
        build(tmp_path)
    reader = build(tmp_path, faults="skip")
    assert [fault.file for fault in reader.faults] == [str(tmp_path / name)]
    assert [sample.key for sample in reader.stream()] == ["00000", "00002"]


@pytest.mark.parametrize(("module", "name"), [(webdataset, "a.tar.gz"), (tfrecord, "a.tfrecord.gz")])
def test_a_folder_of_compressed_shards_alone_says_so(module, name, tmp_path):
    (tmp_path / name).write_bytes(b"")
    for policy in ("refuse", "skip"):
        with pytest.raises(FormatError, match=rf"{name}: compressed"):
            module.open_(tmp_path, index="build", faults=policy)


def test_a_tar_of_a_folder_as_it_is_can_be_read(tmp_path):
    (tmp_path / "source").mkdir()
    for number in range(3):
        (tmp_path / "source" / f"{number}.jpg").write_bytes(jpeg(number))
        (tmp_path / "source" / f"{number}.cls").write_text(f"{number}")
    (tmp_path / "source" / "README").write_text("no sample")
    (tmp_path / "source" / "._0.jpg").write_text("what another system keeps about a file")
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "x.tar", "w") as tar:
        tar.add(tmp_path / "source", ".")
    assert read(build(tmp_path / "data")) == {f"{number}": (number, jpeg(number)) for number in range(3)}


@pytest.mark.parametrize(
    ("label_from", "label"), [(None, 1), ("cls", 1), ("class.txt", 2), ("json", 3), ("json.label", 3), ("json.id", 4)]
)
def test_the_label_is_read_from_where_it_is_said_to_be(label_from, label, tmp_path):
    about = json.dumps({"label": 3, "id": 4}).encode()
    write_tar(tmp_path / "x.tar", {"a.jpg": jpeg(0), "a.cls": b"1", "a.class.txt": b" 2\n", "a.json": about})
    assert build(tmp_path, label_from=label_from)[0].label == label
    with pytest.raises(FormatError, match=r"labels are from .*delete it"):
        webdataset.open_(tmp_path, label_from="other")
    assert webdataset.open_(tmp_path)[0].label == label


@pytest.mark.parametrize(
    ("members", "label_from", "reason"),
    [
        ({}, None, r"no label: no \.cls or \.json; label_from= names another"),
        ({"txt": b"a dog"}, "cls", r"no label: no \.cls"),
        ({"json": b"{}"}, None, r'no label: no "label" in its \.json; label_from="json.FIELD"'),
        ({"txt": b"a dog"}, "txt", r"has a label in \.txt that is no 64-bit integer"),
        ({"json": b'{"label": 1.5}'}, None, "no 64-bit integer"),
        ({"cls": b"9" * 30}, None, "no 64-bit integer"),
        ({"jpeg": jpeg(1), "cls": b"1"}, None, "has 2 members of .jpg, .jpeg, .npy, .png"),
    ],
)
def test_a_sample_without_a_label_is_named_as_that_and_the_others_are_read(members, label_from, reason, tmp_path):
    good = {"b.jpg": jpeg(1), "b.cls": b"1", "b.txt": b"1"}
    bad = {"a.jpg": jpeg(0), **{f"a.{suffix}": content for suffix, content in members.items()}}
    write_tar(tmp_path / "x.tar", bad | good)
    with pytest.raises(FormatError, match=rf"x\.tar: sample 'a' {'' if 'has' in reason else '.*'}{reason}") as raised:
        build(tmp_path, label_from=label_from)
    assert "truncated" not in str(raised.value)
    reader = build(tmp_path, label_from=label_from, faults="skip")
    assert [fault.file for fault in reader.faults] == [str(tmp_path / "x.tar")]
    assert [sample.key for sample in reader.stream()] == ["b"]
    assert not list(tmp_path.glob("*.npz"))  # an index with faults is not kept


def test_shards_in_a_folder_that_is_read_only_are_read(tmp_path, monkeypatch):
    def refuse(path, content):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("helpers.lab.files.write", refuse)
    write_tar(tmp_path / "a.tar", {"a.jpg": jpeg(0), "a.cls": b"1"})
    assert read(build(tmp_path)) == {"a": (1, jpeg(0))} and not list(tmp_path.glob("*.npz"))


def test_shards_of_pictures_and_of_tokens_are_no_data_set(tmp_path):
    stream = io.BytesIO()
    np.save(stream, np.arange(3))
    write_tar(tmp_path / "a.tar", {"a.jpg": jpeg(0), "a.cls": b"1"})
    write_tar(tmp_path / "b.tar", {"b.npy": stream.getvalue(), "b.cls": b"1"})
    with pytest.raises(FormatError, match="has shards of image and of tokens"):
        build(tmp_path)
