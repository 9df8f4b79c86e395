import hashlib
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from helpers.text import TextError, WikiText, corpus
from helpers.text import wikitext_files as files

CONTENT = b"the content of a parquet file" * 1000
NAME = "validation-00000-of-00001.parquet"


class Server(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.status, self.announced, self.asked = CONTENT, 200, None, []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        self.send_response(self.server.status)
        if self.server.announced is not None:
            self.send_header("Content-Length", str(self.server.announced))
        self.end_headers()
        self.wfile.write(self.server.content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    serving = Server()
    thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{serving.server_port}/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    expected = ((len(CONTENT), hashlib.sha256(CONTENT).hexdigest()),)
    monkeypatch.setattr(files, "FILES", {**files.FILES, "validation": expected})
    yield serving
    serving.shutdown()
    thread.join()
    serving.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HELPERS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fetched(cache):
    return sorted(path.name for path in (cache / files.CONFIGURATION).iterdir())


def test_a_file_is_fetched_once(server, cache):
    for _ in range(2):
        (file,) = files.hub_files("validation", download=True)
    assert file.read_bytes() == CONTENT
    assert fetched(cache) == [NAME]
    assert server.asked == [f"/datasets/Salesforce/wikitext/resolve/{files.REVISION}/wikitext-103-raw-v1/{NAME}"]
    assert files.hub_files("validation") == [file]


GARBLED = CONTENT[:-1] + b"?"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"announced": len(CONTENT), "content": CONTENT[:2000]}, "its checksum is wrong|cannot be fetched"),
        ({"content": GARBLED}, "its checksum is wrong"),
        ({"content": CONTENT + b"more"}, "its checksum is wrong"),
        ({"status": 404, "content": b""}, "the server answers 404 Not Found"),
    ],
)
def test_a_download_that_fails_leaves_nothing_and_the_next_starts_clean(fault, message, server, cache):
    vars(server).update(fault)
    with pytest.raises(TextError, match=message) as error:
        files.hub_files("validation", download=True)
    assert NAME in str(error.value)
    assert "\n" not in str(error.value)
    assert fetched(cache) == []
    server.content, server.status, server.announced = CONTENT, 200, None
    (file,) = files.hub_files("validation", download=True)
    assert file.read_bytes() == CONTENT


def test_a_damaged_download_is_refused_and_then_fetched_again(server, cache):
    (file,) = files.hub_files("validation", download=True)
    file.write_bytes(GARBLED)
    with pytest.raises(TextError, match=f"{NAME}: is damaged; give path="):
        files.hub_files("validation")
    server.content = GARBLED
    with pytest.raises(TextError, match="checksum"):
        files.hub_files("validation", download=True)
    assert file.read_bytes() == GARBLED
    server.content = CONTENT
    files.hub_files("validation", download=True)
    assert file.read_bytes() == CONTENT


def test_a_full_disk_leaves_nothing(server, cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.move", full)
    with pytest.raises(TextError, match=r"cannot be fetched .*No space left on device"):
        files.hub_files("validation", download=True)
    assert fetched(cache) == []


def test_a_server_that_is_not_there_is_named(monkeypatch, cache):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(TextError, match=r"test-00000-of-00001\.parquet.*cannot be fetched"):
        files.hub_files("test", download=True)
    assert fetched(cache) == []


def test_nothing_is_fetched_unless_it_is_asked_for(cache):
    with pytest.raises(TextError, match=r"is not there; give path= to .* files, or download=True \(157.0 MB\)"):
        WikiText("train")
    assert not cache.exists()


def test_without_pyarrow_nothing_is_fetched(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TextError, match="pip install pyarrow"):
        WikiText("validation", download=True)
    assert server.asked == []


def test_what_was_fetched_becomes_a_corpus(server, monkeypatch):
    monkeypatch.setattr(files, "parquet", lambda: None)
    monkeypatch.setattr(files, "_parquet_lines", lambda file: iter([" = Title = \n", "", "Words .\n"]))
    text = corpus("validation", download=True)
    assert text.source == "WikiText-103 raw, validation split"
    assert text.lengths.tolist() == [3, 2]
    assert WikiText("validation").vocab == text.vocab


def test_the_recorded_files_are_those_of_the_hub():
    assert sum(size for split in files.FILES.values() for size, _ in split) == 315_466_397  # the hub's own total
    assert all(len(bytes.fromhex(digest)) == 32 for split in files.FILES.values() for _, digest in split)


def test_parquet_files_are_read_whole_or_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "wikitext-103-raw-v1"
    folder.mkdir()
    for part, rows in enumerate([["", " = Title = \n"], ["The cat\n", "The dog\n"]]):
        parquet.write_table(pyarrow.table({"text": rows}), folder / f"train-0000{part}-of-00002.parquet")
    text = WikiText("train", tmp_path)
    assert text.source == "WikiText-103 raw, train split"
    assert [text.vocab.decode(sample) for sample in text] == [["=", "title", "="], ["the", "cat"], ["the", "dog"]]
    second = folder / "train-00001-of-00002.parquet"
    second.write_bytes(second.read_bytes()[:-20])
    with pytest.raises(TextError, match="not a whole parquet file"):
        WikiText("train", tmp_path)
    second.unlink()
    with pytest.raises(TextError, match=r"train split is 2 parquet files, here are only train-00000-of-00002\.parquet"):
        WikiText("train", tmp_path)
