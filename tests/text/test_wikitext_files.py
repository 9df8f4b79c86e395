import hashlib
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from helpers.text import TextError, WikiText
from helpers.text import wikitext_files as files

CONTENT = b"the content of a parquet file" * 1000
NAME = "validation-00000-of-00001.parquet"


class Server(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.status, self.asked = CONTENT, 200, []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        self.send_response(self.server.status)
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
    monkeypatch.setitem(files.CHECKSUMS, "validation", (hashlib.sha256(CONTENT).hexdigest(),))
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


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [(200, CONTENT[:-1] + b"?", "invalid hash value"), (200, CONTENT[:2000], "invalid hash"), (404, b"", "404")],
)
def test_a_download_that_fails_leaves_nothing_and_the_next_starts_clean(status, content, message, server, cache):
    server.status, server.content = status, content
    with pytest.raises(TextError, match=f"{NAME}: not fetched .*{message}") as error:
        files.hub_files("validation", download=True)
    assert "\n" not in str(error.value)
    assert fetched(cache) == []
    server.status, server.content = 200, CONTENT
    (file,) = files.hub_files("validation", download=True)
    assert file.read_bytes() == CONTENT


def test_a_server_that_is_not_there_is_named(monkeypatch, cache):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(TextError, match=r"test-00000-of-00001\.parquet: not fetched"):
        files.hub_files("test", download=True)
    assert fetched(cache) == []


def test_nothing_is_fetched_unless_it_is_asked_for(cache):
    with pytest.raises(TextError, match=r"is not there; give path= to .* files, or download=True"):
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
    text = WikiText("validation", download=True)
    assert text.source == "WikiText-103 raw, validation split"
    assert text.lengths.tolist() == [3, 2]
    assert WikiText("validation").vocab == text.vocab


def test_parquet_files_are_read_whole_or_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "wikitext-103-raw-v1"
    folder.mkdir()
    for part, rows in enumerate([["", " = Title = \n"], ["The cat\n", "The dog\n"]]):
        parquet.write_table(pyarrow.table({"text": rows}), folder / f"train-0000{part}-of-00002.parquet")
    text = WikiText("train", folder)
    assert text.source == "WikiText-103 raw, train split"
    assert [text.vocab.decode(sample) for sample in text] == [["=", "title", "="], ["the", "cat"], ["the", "dog"]]
    second = folder / "train-00001-of-00002.parquet"
    second.write_bytes(second.read_bytes()[:-20])
    with pytest.raises(TextError, match="not a whole parquet file"):
        WikiText("train", folder)
    second.unlink()
    with pytest.raises(TextError, match=r"train split is 2 parquet files, here are only train-00000-of-00002\.parquet"):
        WikiText("train", folder)
