"""What was measured, on disk, and how it gets there: experiments, the plan of a run, rows, and numbers made of them."""

from .store import (
    PROVENANCE,
    SECONDS,
    STATUS,
    RecordError,
    Row,
    devices,
    folder,
    key,
    path,
    read,
    read_rows,
    replace,
    summary,
    whole_rows,
)

__all__ = [
    "PROVENANCE",
    "SECONDS",
    "STATUS",
    "RecordError",
    "Row",
    "devices",
    "folder",
    "key",
    "path",
    "read",
    "read_rows",
    "replace",
    "summary",
    "whole_rows",
]
