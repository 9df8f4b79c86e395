"""Measurements on disk: `<results>/<gpu>/<chapter>/<table>.csv`, one row a measurement.

A row has its configuration, its metrics, its provenance and a checksum of its other cells, so that a truncated,
garbled or hand-edited cell raises an error. Files are replaced atomically: a killed process leaves the old file or the
new one. Adding rows rewrites the table, which has at most some hundred rows.
"""

import csv
import io
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..lab import STATUS, Row, files
from ..lab.files import project_root

PROVENANCE = ["preset", "gpu", "driver", "torch", "cuda", "date", "commit", "method"]
SECONDS = "seconds"  # that its configuration took, all attempts together
PROCESS = "run"  # the start of the process that measured the row, in UTC
# Rows of older methods lack some. Clock and power are a GPU's, where it took most power during the row.
RUN = [SECONDS, "load", "attempts", "noisy", "matmul_tflops", "pages", "clock_mhz", "power_w", PROCESS]
CHECKSUM = "checksum"


class RecordError(Exception):
    """A damaged record file: the message names the file, the row and the fault."""


def folder(results: Path | str | None = None) -> Path:
    """The folder of all records: `results`, else `$HELPERS_RESULTS`, else the project's `data/results`."""
    if results is None:
        results = os.environ.get("HELPERS_RESULTS") or project_root() / "data" / "results"
    return Path(results)


def path(gpu: str, chapter: str, table: str, results: Path | str | None = None) -> Path:
    """The file of a table; `gpu` is the device's folder name, as `machine.slug` makes it."""
    return folder(results) / gpu / chapter / f"{table}.csv"


def devices(results: Path | str | None = None, *, cpu: bool = False) -> list[str]:
    """The folder names of the GPUs (or CPUs) that have records, sorted."""
    root = folder(results)
    names = sorted(p.name for p in root.iterdir() if p.is_dir() and any(p.rglob("*.csv"))) if root.is_dir() else []
    return [name for name in names if name.startswith("cpu-") == cpu]


def read(gpu: str, chapter: str, table: str, results: Path | str | None = None) -> pd.DataFrame:
    """A table as it was measured; empty if there is none. Raises `RecordError` if it is damaged."""
    rows = read_rows(path(gpu, chapter, table, results))
    frame = pd.DataFrame(rows).drop(columns=CHECKSUM, errors="ignore")
    for column in frame.columns:
        if column in [*PROVENANCE, STATUS, PROCESS, "noisy"]:
            continue
        filled = frame[column] != ""
        numbers = pd.to_numeric(frame[column].where(filled), errors="coerce")
        if numbers.notna().equals(filled):  # all non-empty cells are numbers
            frame[column] = numbers
    return frame


def read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of a record file as text, with checksums verified; none if the file is absent."""
    try:
        text = Path(files.regular(file)).read_text(encoding="utf-8-sig")  # spreadsheets write a BOM
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{file}: cannot be read ({error})") from error
    try:
        lines = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise _damaged(file, 1, f"not a table ({error})") from error
    header = lines[0] if lines else []
    missing = [name for name in [*PROVENANCE, STATUS, CHECKSUM] if name not in header]
    if missing:
        raise _damaged(file, 1, f"the header lacks {', '.join(missing)}")
    if not text.endswith("\n"):
        raise _damaged(file, len(lines), "the last line is cut off")
    rows: list[dict[str, str]] = []
    first: dict[tuple[str, ...], int] = {}
    for number, cells in enumerate(lines[1:], start=2):
        if len(cells) != len(header):
            raise _damaged(file, number, f"{len(cells)} cells where the header has {len(header)}")
        row = dict(zip(header, cells, strict=True))
        if row[CHECKSUM] != checksum(row):
            raise _damaged(file, number, "its cells do not match its checksum")
        if first.setdefault(tuple(cells), number) != number:  # it would count twice in a mean
            raise _damaged(file, number, f"the same row as line {first[tuple(cells)]}")
        rows.append(row)
    return rows


def whole_rows(file: Path) -> list[dict[str, str]]:
    """The rows of a record file; none if it is damaged."""
    try:
        return read_rows(file)
    except RecordError:
        return []


def replace(file: Path, rows: Iterable[Row], identity: Iterable[str] = ()) -> None:
    """Add rows to a record file, replacing those that agree with a new one in all `identity` columns.

    Raises `RecordError`, and leaves the file unchanged, if it is damaged.
    """
    new = [{name: cell(value) for name, value in row.items()} for row in rows]
    identity = list(identity)
    replaced = {key(row, identity) for row in new} if identity else set()
    file.parent.mkdir(parents=True, exist_ok=True)
    with files.locked(file.parent):
        retained = [row for row in read_rows(file) if key(row, identity) not in replaced]
        _write(file, retained + new)


def key(row: Mapping[str, Any], identity: Iterable[str]) -> tuple[str, ...]:
    """The identity columns of a row as text, equal for a row just measured and the same row read from a file."""
    return tuple(cell(row.get(name, "")) for name in identity)


def run_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What tells a row's run from others: the start of its process, of older rows the day and the commit."""
    process = row.get(PROCESS)
    return (process,) if process and process == process else (row["date"], row["commit"])


def cell(value: Any) -> str:
    """A value as text for a file: floats with six significant digits, None and NaN empty."""
    if value is None or value != value:
        return ""
    if isinstance(value, (float, np.floating)):
        return f"{float(value):.6g}"
    return " ".join(str(value).split())


def checksum(row: Mapping[str, str]) -> str:
    """CRC-32 of the row's non-empty cells and their columns' names, in eight hex digits; independent of their order."""
    filled = sorted(f"{name}={value}" for name, value in row.items() if name != CHECKSUM and value != "")
    return f"{zlib.crc32(chr(10).join(filled).encode()):08x}"


def summary(results: Path | str | None = None) -> pd.DataFrame:
    """One row a machine: driver, torch, CUDA, first and last date, number of rows. Damaged tables are left out."""
    columns = ["gpu", "driver", "torch", "cuda", "first_date", "last_date", "rows"]
    lines = []
    for gpu in [*devices(results), *devices(results, cpu=True)]:
        files = sorted((folder(results) / gpu).rglob("*.csv"))
        rows = [row for file in files for row in whole_rows(file)]
        if rows:
            versions = {name: ", ".join(sorted({row[name] for row in rows})) for name in columns[:4]}
            dates = sorted(row["date"] for row in rows)
            lines.append(versions | {"first_date": dates[0], "last_date": dates[-1], "rows": len(rows)})
    return pd.DataFrame(lines, columns=columns)


def _write(file: Path, rows: list[dict[str, str]]) -> None:
    rows = list({tuple(sorted(row.items())): row for row in rows}.values())  # each once: a repeated one is damage
    measured = list(dict.fromkeys(name for row in rows for name in row))
    last = [STATUS, *RUN, *PROVENANCE, CHECKSUM]
    header = [name for name in measured if name not in last] + last
    text = io.StringIO()
    writer = csv.DictWriter(text, header, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(row | {CHECKSUM: checksum(row)} for row in rows)
    files.write(file, text.getvalue())


def _damaged(file: Path, row: int, reason: str) -> RecordError:
    return RecordError(
        f"{file}, line {row}: {reason}. Nothing was changed: restore the file, or delete that line and measure again"
    )
