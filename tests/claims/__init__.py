"""What each sentence of the report claims, worked out anew from the files of the records.

A claim is a sentence with places for what differs, and a function that computes what must stand in them by pandas
alone: none of the code that wrote the sentence has a part in it. A sentence with a number that no claim knows is a
fault, too.
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pandas as pd

# The claims of each chapter stand in modules of their own, imported below, which register them.
Shown = dict[str, str]
Computed = dict[str, object] | list[dict[str, object]]


@dataclass(frozen=True)
class Records:
    """The record files under a folder."""

    folder: Path

    def rows(self, table: str, **where: object) -> pd.DataFrame:
        """The measured rows of `chapter/table`, of all devices, whose columns hold these values."""
        rows = _read(self.folder, table)
        for column, value in where.items() if len(rows) else []:
            numeric = pd.api.types.is_numeric_dtype(rows[column])
            wanted = float(str(value).replace(",", "")) if numeric else str(value)
            rows = rows[rows[column] == wanted]
        return rows

    def one(self, table: str, **where: object) -> pd.Series:
        """The only row of this kind."""
        rows = self.rows(table, **where)
        assert len(rows) == 1, f"{len(rows)} rows of {table} with {where}"
        return rows.iloc[0]

    def origin(self, table: str) -> dict[str, str]:
        """What a caption must say of where a table's rows come from."""
        said = []
        for gpu, rows in self.rows(table).groupby("gpu", sort=False):
            versions = {f"torch {row.torch}" + _cuda(row) for row in rows.itertuples()}
            first, last = rows["date"].min(), rows["date"].max()
            said.append(f"{gpu}, {', '.join(sorted(versions))}, {first}" + ("" if first == last else f" to {last}"))
        return {"origin": "; ".join(said)}

    def devices(self) -> list[str]:
        """Their names, the longest first."""
        return _devices(self.folder)


@functools.cache
def _read(folder: Path, table: str) -> pd.DataFrame:
    frames = [pd.read_csv(file) for file in sorted(folder.glob(f"*/{table}.csv"))]
    if not frames:
        return pd.DataFrame()
    rows = pd.concat(frames, ignore_index=True)
    return rows[(rows["status"] == "ok") & (rows["preset"] != "small")]


@functools.cache
def _devices(folder: Path) -> list[str]:
    names = {name for file in folder.rglob("*.csv") for name in pd.read_csv(file, usecols=["gpu"])["gpu"]}
    return sorted(names, key=len, reverse=True)


@dataclass(frozen=True)
class Claim:
    pattern: re.Pattern[str]
    compute: Callable[..., Computed]


CLAIMS: list[Claim] = []
NUMBER = r"[\d.,]+"


def claim(sentence: str, **kinds: str) -> Callable[[Callable[..., Computed]], Callable[..., Computed]]:
    """`{name}` in the sentence stands for what differs; `kinds` narrow what may stand there, as regular expressions.

    The function gets the records and what was shown, by name, and returns what must have been shown in some or all of
    the places: text for text, True or False for reached or missed, else a number, which has to agree in as many
    digits as are shown. Where a sentence doesn't say which of several it is about, it returns a list.
    """
    kinds = {"gpu": "(?:CPU|NVIDIA) [^:,]+"} | kinds
    parts = re.split(r"\{(\w+)\}", sentence)
    made = [
        re.escape(part) if place % 2 == 0 else f"(?P<{part}>{kinds.get(part, '.+?')})"
        for place, part in enumerate(parts)
    ]

    def add(compute: Callable[..., Computed]) -> Callable[..., Computed]:
        CLAIMS.append(Claim(re.compile("".join(made)), compute))
        return compute

    return add


def faults(sentence: str, records: Records) -> list[str]:
    """What is wrong with the numbers of a sentence; nothing, if it has none."""
    told = sentence.replace("**", "").strip()
    if not _has_numbers(told, records):
        return []
    found = _matching(told)
    if found is None:
        parts = re.split(r"(?<=[.!?]) (?=[A-Z])", told)
        if len(parts) == 1:
            return [f"no claim knows this sentence: {told}"]
        return [fault for part in parts for fault in faults(part, records)]
    known, shown = found
    computed = known.compute(records, **shown)
    either = [_differences(shown, one) for one in (computed if isinstance(computed, list) else [computed])]
    return [f"{fault}: {told}" for fault in min(either, key=len, default=["nothing of it is recorded"])]


def _differences(shown: Shown, expected: dict[str, object]) -> list[str]:
    wrong = {name: value for name, value in expected.items() if not _agrees(shown[name], value)}
    return [f"{name} = {shown[name]}, where the records give {value}" for name, value in wrong.items()]


def _matching(told: str) -> tuple[Claim, Shown] | None:
    for known in CLAIMS:
        match = known.pattern.fullmatch(told.removesuffix(".")) or known.pattern.fullmatch(told)
        if match:
            return known, match.groupdict()
    return None


def _has_numbers(told: str, records: Records) -> bool:
    for name in records.devices():
        told = told.replace(name, "")
    told = re.sub(r"\[.*?\]\(.*?\)|`.*?`", "", told)
    return re.search(r"\d", told) is not None


def _agrees(shown: str, value: object) -> bool:
    if isinstance(value, str):
        return shown == value
    if isinstance(value, bool) or type(value).__name__ == "bool":  # numpy's, too
        return shown == ("reached" if value else "missed")
    if pd.isna(value):
        return shown == "–"
    match = re.fullmatch(r"([+-]?[\d,]+(?:\.(\d+))?)(?:e([+-]\d+))?(%?)", shown)
    if match is None:
        return False
    digits, exponent = len(match[2] or ""), int(match[3] or 0)
    number = float(match[1].replace(",", "")) * 10.0**exponent
    wanted = float(value) * (100 if match[4] else 1)
    return abs(number - wanted) <= 0.5001 * 10.0 ** (exponent - digits)


def _cuda(row: object) -> str:
    return "" if row.cuda == "none" else f", CUDA {row.cuda}, driver {row.driver}"


def sentences(notebook: Path) -> Iterator[str]:
    """The sentences and list items that a notebook's cells print, and the rows of the tables for the README."""
    for cell in nbformat.read(notebook, as_version=4).cells:
        for output in cell.get("outputs", []):
            text = output.get("data", {}).get("text/markdown", "")
            told = output.get("metadata", {}).get("helpers", {})
            if not text or text.startswith("```") or (told.get("report") is False and not told.get("readme")):
                continue
            for line in text.splitlines():
                yield re.sub(r"^\*\*\[.*?\]\(.*?\)\.\*\* \*.*?\* |^- ", "", line)


from . import amp, batching, compilers, pipelines, profiling, rush, summary, swiglu  # noqa: E402, F401
