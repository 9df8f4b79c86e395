"""A file that was made to do harm is a named fault: it takes no memory, runs nothing and reads nothing else."""

import io
import struct
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.pipelines.formats import Fault, FormatError, Sample, files, mapped, tfrecord, webdataset

GOOD = {"ok.jpg": b"not decoded", "ok.cls": b"5"}
HUGE = 6_300_000_000


def member(name, content=b"", **fields):
    made = tarfile.TarInfo(name)
    made.size = len(content)
    for field, value in fields.items():
        setattr(made, field, value)
    return made, content


def write_tar(file, *members, format=tarfile.GNU_FORMAT):
    with tarfile.open(file, "w", format=format) as tar:
        for made, content in members:
            tar.addfile(made, io.BytesIO(content) if content else None)


def claiming(name, size, kind=tarfile.REGTYPE):
    """A member whose header claims a size, in the notation of sizes that eight octal digits cannot hold."""
    made, _ = member(name, type=kind)
    header = bytearray(made.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = (
        (size + (256**11 if size < 0 else 0)).to_bytes(11, "big").rjust(12, b"\xff" if size < 0 else b"\x80")
    )
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def sparse(name, size):
    """A member of 512 bytes that says that it is one of `size` bytes."""
    headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": name,
        "GNU.sparse.realsize": f"{size}",
    }
    return member(name, b"0\n".ljust(512, b"\0"), pax_headers=headers)


def nested(depth):
    return b'{"label": 1, "a": ' + b"[" * depth + b"]" * depth + b"}"


LINK = {"type": tarfile.LNKTYPE, "linkname": "a.jpg"}
PAX = tarfile.PAX_FORMAT
LABEL, JPEG = member("a.cls", b"1"), member("a.jpg", b"data")
HOSTILE = {
    "hard link to itself": ([member("a.jpg", **LINK), LABEL], "is a link or a device"),
    "symbolic link": (
        [member("a.jpg", **LINK | {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}), LABEL],
        "is a link",
    ),
    "pipe": ([member("a.jpg", type=tarfile.FIFOTYPE), LABEL], "is a link or a device"),
    "sparse": ([sparse("a.jpg", HUGE), LABEL], f"is sparse: it would take {HUGE} bytes"),
    "parent folder": ([member("../../a.jpg", b"data"), member("../../a.cls", b"1")], "lies outside of its folder"),
    "root folder": ([member("/tmp/a.jpg", b"data"), member("/tmp/a.cls", b"1")], "lies outside of its folder"),
    "twice": ([JPEG, JPEG, LABEL], "is there twice"),
    "deep json": ([JPEG, member("a.json", nested(200_000))], "nested too deeply"),
    "list json": ([JPEG, member("a.json", b"[1, 2]")], "is a list, not an object"),
    "broken json": ([JPEG, member("a.json", b"{")], "cannot be read"),
    "long number": ([JPEG, member("a.json", b'{"label": ' + b"9" * 10_000 + b"}")], "cannot be read"),
    "name that is no text": ([member("\udcff.jpg", b"data"), member("\udcff.cls", b"1")], "sample"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_member_of_a_tar_is_named_and_costs_only_its_sample(name, tmp_path):
    members, reason = HOSTILE[name]
    good = [member(file, content) for file, content in GOOD.items()]
    write_tar(tmp_path / "x.tar", *members, *good, format=PAX)
    tracemalloc.start()
    with pytest.raises(FormatError, match=rf"x\.tar: .*{reason}"):
        webdataset.open_(tmp_path, index="build")
    reader = webdataset.open_(tmp_path, index="build", faults="skip")
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    assert [fault.file for fault in reader.faults] == [str(tmp_path / "x.tar")]
    assert [(sample.key, sample.label) for sample in reader.stream()] == [("ok", 5)]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (claiming("a.jpg", HUGE), f"{HUGE} bytes, beyond the end"),
        (claiming("a.jpg", 2**80), "bytes"),
        (claiming("a.jpg", -512), "has -512 bytes"),
        (claiming("././@LongLink", HUGE, tarfile.GNUTYPE_LONGNAME), "a header of"),
        (claiming("././@LongLink", -512, tarfile.GNUTYPE_LONGNAME), "a header of -512 bytes"),
        (b"x" * 512, "no end mark"),
    ],
)
def test_a_header_that_claims_any_size_is_a_fault_of_its_file_at_once(header, reason, tmp_path):
    write_tar(tmp_path / "x.tar", *(member(file, content) for file, content in GOOD.items()))
    end = (tmp_path / "x.tar").read_bytes().rstrip(b"\0")
    end = end.ljust(-(-len(end) // 512) * 512, b"\0")
    (tmp_path / "x.tar").write_bytes(end + header + b"data".ljust(512, b"\0") + bytes(1024))
    with pytest.raises(FormatError, match=rf"x\.tar: truncated or damaged \(.*{reason}"):
        webdataset.open_(tmp_path, index="build")
    reader = webdataset.open_(tmp_path, index="build", faults="skip")
    assert len(reader.faults) == 1 and [sample.key for sample in reader.stream()] == ["ok"]


def test_a_chain_of_headers_is_a_fault_of_its_file(tmp_path):
    write_tar(tmp_path / "x.tar", *(member(file, content) for file, content in GOOD.items()))
    chain = tarfile.TarInfo.create_pax_global_header({"a": "b"}) * 2000
    (tmp_path / "y.tar").write_bytes(chain + bytes(1024))
    (tmp_path / "z.tar").write_bytes(tarfile.TarInfo.create_pax_global_header({"a": "b" * 100_000}) + bytes(1024))
    reader = webdataset.open_(tmp_path, index="build", faults="skip")
    assert [fault.file[-5:] for fault in reader.faults] == ["y.tar", "z.tar"] and len(reader) == 1
    assert "recursion" in reader.faults[0].what and "a header of" in reader.faults[1].what


def pieces_of(size):
    """Places in a tar of small members, most of them in its headers, and what is written there."""
    return st.tuples(
        st.integers(0, size - 1),
        st.binary(min_size=1, max_size=12) | st.sampled_from([b"\xff" * 12, b"L", b"x", b"g", b"S"]),
    )


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(pieces_of(3072), min_size=1, max_size=3))
def test_a_tar_with_any_bytes_is_read_or_named(changes, tmp_path):
    write_tar(tmp_path / "x.tar", *(member(file, content) for file, content in GOOD.items()), format=PAX)
    raw = bytearray((tmp_path / "x.tar").read_bytes())
    for at, content in changes:
        raw[at : at + len(content)] = content
    for at in range(0, 3072, 512):  # headers with right checksums
        header = raw[at : at + 512]
        header[148:156] = b" " * 8
        raw[at + 148 : at + 156] = b"%06o\0 " % sum(header)
    (tmp_path / "x.tar").write_bytes(raw)
    (tmp_path / "x.idx.npz").unlink(missing_ok=True)
    try:
        assert [type(item) for item in webdataset.open_(tmp_path, index="build", faults="skip").stream()] == [Sample]
    except FormatError as error:
        assert "x.tar" in str(error)


@pytest.fixture
def tars(tmp_path):
    write_tar(tmp_path / "x.tar", *(member(file, content) for file, content in GOOD.items()))
    write_tar(tmp_path / "y.tar", *(member(file, content) for file, content in GOOD.items()))
    webdataset.open_(tmp_path, index="build")
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"sizes": [2**62]}, "outside of the shard"),
        ({"offsets": [-1]}, "outside of the shard"),
        ({"sizes": [[1]]}, "shapes"),
        ({"key_sizes": [1 << 40]}, "keys have other sizes"),
        ({"offsets": ["a"]}, "invalid literal"),
    ],
)
def test_an_index_that_lies_about_its_shard_is_a_fault(changed, reason, tars):
    with np.load(tars / "x.idx.npz") as stored:
        table = dict(stored) | {name: np.array(value) for name, value in changed.items()}
    np.savez(tars / "x.idx.npz", **table)
    with pytest.raises(FormatError, match=rf"x\.idx\.npz: .*{reason}"):
        webdataset.open_(tars)
    reader = webdataset.open_(tars, faults="skip")
    assert len(reader.faults) == 1 and [sample.key for sample in reader.stream()] == ["ok"]


def test_a_compressed_index_is_not_unpacked(tars):
    with np.load(tars / "x.idx.npz") as stored:
        table = dict(stored)
    np.savez_compressed(tars / "x.idx.npz", **table | {"padding": np.zeros(30_000_000, np.uint8)})
    assert (tars / "x.idx.npz").stat().st_size < 100_000 and zipfile.is_zipfile(tars / "x.idx.npz")
    tracemalloc.start()
    with pytest.raises(FormatError, match="would take more memory than its size"):
        webdataset.open_(tars)
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()


def test_a_name_of_any_number_is_a_shard_as_another(tars):
    (tars / "x.tar").rename(tars / "99999999999.tar")
    (tars / "x.idx.npz").rename(tars / "99999999999.idx.npz")
    (tars / "²").touch()
    reader = webdataset.open_(tars, faults="skip")
    assert len(reader) == 2
    assert [fault.what for fault in reader.faults] == [
        "no such shard, nor the next 99999999998, though there are later ones"
    ]


@pytest.mark.parametrize("library", [False, True])
def test_a_folder_that_is_called_like_a_command_runs_nothing(library, tmp_path, monkeypatch):
    pytest.importorskip("webdataset")
    monkeypatch.chdir(tmp_path)
    samples = [Sample("a", 1, b"data")]
    webdataset.write(samples, "pipe:touch ran;#", "image")
    assert [sample.key for sample in webdataset.open_("pipe:touch ran;#", library=library).stream()] == ["a"]
    assert [file.name for file in tmp_path.iterdir()] == ["pipe:touch ran;#"]


# TFRecord


def frame(record, length=None):
    masked = pytest.importorskip("tfrecord.writer").TFRecordWriter.masked_crc
    head = struct.pack("<Q", len(record) if length is None else length)
    return head + masked(head) + record + masked(record)


def example(**features):
    pb2 = pytest.importorskip("tfrecord.example_pb2")
    made = pb2.Example()
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
        {"label": [b"1"]},
        {"key": [3]},
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
    assert reader.labels.tolist() == [tfrecord.UNKNOWN, 5] and [fault.sample for fault in reader.faults] == [0]


@pytest.mark.parametrize("verify", [False, True])
def test_a_record_that_claims_to_be_huge_takes_no_memory(verify, tmp_path):
    good, record = frame(example(**OK)), example(**OK)
    (tmp_path / "00000.tfrecord").write_bytes(good + frame(record, HUGE))
    with pytest.raises(FormatError, match=rf"truncated or damaged \(no whole record at byte {len(good)}\)"):
        tfrecord.open_(tmp_path, index="build")
    assert len(tfrecord.open_(tmp_path, index="build", faults="skip")) == 1
    (tmp_path / "00000.tfindex").write_text(f"0 {len(good)}\n{len(good)} {HUGE + 16}\n")  # it agrees with the record
    tracemalloc.start()
    items = list(tfrecord.open_(tmp_path, faults="skip", verify=verify).stream())
    assert [type(item) for item in items] == [Sample, Fault] and "truncated" in items[1].what
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()


# Small files and one mapped file


def table(folder, *rows):
    lines = [",".join(files.COLUMNS), *(",".join(map(str, row)) for row in rows)]
    (folder / files.TABLE).write_text("\r\n".join(lines) + "\r\n", encoding="utf-8-sig")


@pytest.mark.parametrize("name", ["../secret.jpg", "{}/secret.jpg", "0/../../secret.jpg"])
def test_the_table_of_small_files_reads_nothing_outside_of_its_folder(name, tmp_path):
    folder = tmp_path / "data"
    (folder / "0").mkdir(parents=True)
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    (folder / "0" / "a..b.jpg").write_bytes(b"secret")
    row = (0, "key", 6, 1567167314)
    table(folder, (name.format(tmp_path), *row), ("0/a..b.jpg", *row))
    with pytest.raises(FormatError, match=r"sample 0: .*outside of the data set's folder"):
        files.open_(folder, verify=False)[0]
    items = list(files.open_(folder, faults="skip", verify=False).stream())
    assert [type(item) for item in items] == [Fault, Sample] and items[1].data.tobytes() == b"secret"


def test_a_file_that_has_grown_is_not_read_whole(tmp_path):
    (tmp_path / "0").mkdir()
    with open(tmp_path / "0" / "a.jpg", "wb") as stream:
        stream.truncate(HUGE)  # all of it a hole
    table(tmp_path, ("0/a.jpg", 0, "a", 5, 0), ("0/a.jpg", 0, "a", 2**62, 0))
    reader = files.open_(tmp_path, faults="skip")
    tracemalloc.start()
    assert reader[0].what == f"has {HUGE} bytes; the table says 5"
    assert "more than fit" in reader[1].what
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


@pytest.mark.parametrize("row", [("0/a.jpg", 2**70, "a", 1, 1), ("0/a.jpg", 1, "a", 1, -1)])
def test_a_table_with_numbers_beyond_its_columns_is_named(row, tmp_path):
    table(tmp_path, row)
    with pytest.raises(FormatError, match=r"labels\.csv: cannot be read as a table"):
        files.open_(tmp_path)


def test_a_table_is_rebuilt_of_files_of_any_names(tmp_path):
    (tmp_path / "3").mkdir()
    for name in ('a"b.jpg', "c,d.JPEG"):
        (tmp_path / "3" / name).write_bytes(b"data")
    files.open_(tmp_path, index="build")
    assert [(sample.key, sample.label) for sample in files.open_(tmp_path).stream()] == [('a"b', 3), ("c,d", 3)]


def test_a_mapped_file_whose_checksums_are_right_may_still_lie(tmp_path):
    import zlib

    mapped.write([Sample("a", 0, b"data"), Sample("b", 0, b"data")], tmp_path / "data", "image")
    file = tmp_path / "data" / mapped.NAME
    raw = bytearray(file.read_bytes())
    header = list(mapped.HEADER.unpack(raw[: mapped.HEADER.size]))

    def write_with(offsets=(0, 4, 8), count=2):
        tables = struct.pack("<3Q", *offsets) + bytes(raw[mapped.HEADER.size + 24 :][: 34 + 16 + 8])
        tables = tables[: 28 * 2 + 16 + header[5]]
        fields = [*header[:4], count, *header[5:8], zlib.crc32(tables)]
        start = mapped.HEADER.pack(*fields, 0)[:-4]
        raw[: mapped.HEADER.size + len(tables)] = start + struct.pack("<I", zlib.crc32(start)) + tables
        file.write_bytes(raw)

    write_with()
    assert len(list(mapped.open_(tmp_path / "data").stream())) == 2
    write_with(offsets=(0, 8, 4))
    with pytest.raises(FormatError, match="overlap"):
        mapped.open_(tmp_path / "data", faults="skip")
    write_with(count=2**60)
    with pytest.raises(FormatError, match="do not end before the data"):
        mapped.open_(tmp_path / "data", faults="skip")
