"""What was measured, on disk, and how it gets there: experiments, the plan of a run, rows, and numbers made of them."""

from .store import PROVENANCE, STATUS, RecordError, Row, devices, folder, path, read, read_rows, replace, summary

__all__ = [
    "PROVENANCE",
    "STATUS",
    "RecordError",
    "Row",
    "devices",
    "folder",
    "path",
    "read",
    "read_rows",
    "replace",
    "summary",
]
