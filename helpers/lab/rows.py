"""What a measurement returns: a row of a table, its configuration and what was measured."""

from typing import Any

Row = dict[str, Any]
STATUS = "status"  # the column of a row that says "ok", or why there are no figures
