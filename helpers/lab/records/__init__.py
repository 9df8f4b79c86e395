"""What was measured, on disk, and how it gets there: experiments, the plan of a run, rows, and numbers made of them."""

from ..lab.rows import STATUS, Row
from .store import RecordError, devices, folder, read, read_rows, summary

__all__ = ["STATUS", "RecordError", "Row", "devices", "folder", "read", "read_rows", "summary"]
