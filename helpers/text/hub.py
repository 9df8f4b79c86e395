"""WikiText-103's files on the Hugging Face hub: one revision, and what each file must be.

Sizes and checksums are those that the hub records for that revision (its LFS object ids). `$HF_ENDPOINT` names
another server that holds the same files.
"""

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from .files import BLOCK, TextError, cache_folder, replacing, sha256

DATASET, CONFIGURATION = "Salesforce/wikitext", "wikitext-103-raw-v1"
REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"
# split -> (name, bytes, sha256) of its files
FILES = {
    "train": (
        (
            "train-00000-of-00002.parquet",
            156_987_808,
            "74da360f23826045b3e6ac6375411fdb15f003030aa74f2596ed08b857cb9212",
        ),
        (
            "train-00001-of-00002.parquet",
            157_088_770,
            "ba090ac30dbf5461e8dcbdd1a1b8e6f3cf9c2c756d64f0c1220450acd514f720",
        ),
    ),
    "validation": (
        (
            "validation-00000-of-00001.parquet",
            657_209,
            "204929b7ff9d6184953f867dedb860e40aa69c078fc1e54b3baaa8fb28511c4c",
        ),
    ),
    "test": (
        ("test-00000-of-00001.parquet", 732_610, "5f1bea067869d04849c0f975a2b29c4ff47d867f484f5010ea5e861eab246d91"),
    ),
}
SECONDS = 60  # without a byte, then the download counts as broken off


def files(split: str, cache: Path | str | None = None, *, download: bool = False) -> list[Path]:
    """A split's files in the cache, each checked against its checksum; fetched if `download` allows it."""
    folder = cache_folder(cache) / CONFIGURATION
    return [_file(folder / name, size, digest, download) for name, size, digest in FILES[split]]


def _file(file: Path, size: int, digest: str, download: bool) -> Path:
    if file.is_file() and file.stat().st_size == size and sha256(file) == digest:
        return file
    if not download:
        state = "is damaged" if file.exists() else "is not there"
        raise TextError(f"{file}: {state}; give path= to WikiText-103's files, or download=True ({size / 1e6:.1f} MB)")
    _download(f"{address()}/{file.name}", file, size, digest)
    return file


def address() -> str:
    """Where the files are: `$HF_ENDPOINT`, else the hub itself."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return f"{endpoint.rstrip('/')}/datasets/{DATASET}/resolve/{REVISION}/{CONFIGURATION}"


def _download(url: str, file: Path, size: int, digest: str) -> None:
    """Fetch a file; it takes its name only when its size and checksum are right."""
    from tqdm import tqdm

    bar = tqdm(desc=file.name, total=size, unit="B", unit_scale=True, delay=1, leave=False)
    with replacing(file) as stream, bar:
        received, found = 0, hashlib.sha256()
        for block in _blocks(url):
            received += len(block)
            if received > size:
                raise _refused(url, f"more than the {size:,} bytes it should have")
            found.update(block)
            stream.write(block)
            bar.update(len(block))
        if received < size:
            raise _refused(url, f"broke off after {received:,} of {size:,} bytes")
        if found.hexdigest() != digest:
            raise _refused(url, f"its checksum is {found.hexdigest()[:12]}…, not {digest[:12]}…")


def _blocks(url: str) -> Iterator[bytes]:
    request = urllib.request.Request(url, headers={"User-Agent": "deep-learning-speed"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            while block := answer.read(BLOCK):
                yield block
    except urllib.error.HTTPError as error:
        raise _refused(url, f"the server answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _refused(url, f"cannot be fetched ({getattr(error, 'reason', None) or error})") from error


def _refused(url: str, reason: str) -> TextError:
    return TextError(f"{url}: {reason}; nothing was kept: try again, or give path= to files you have")
