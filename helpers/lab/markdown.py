"""What a record or a script says, as Markdown that shows it as it is: in a sentence, as code, in a table."""

import re
from collections.abc import Iterable


def escaped(text: str) -> str:
    """Text that Markdown shows as it is: no links, tags, emphasis or further cells."""
    return re.sub(r"([\\`*_\[\]<>|$])", r"\\\1", text)


def code(text: str) -> str:
    """A code span in one line, in which nothing is a link or a tag, nor a mention, which would notify somebody."""
    line = " ".join(text.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    margin = " " if "`" in (line[:1], line[-1:]) else ""
    return f"{fence}{margin}{line}{margin}{fence}"


def table(header: Iterable, rows: Iterable[Iterable]) -> str:
    """Cells of Markdown; a bar would end a cell, also within code."""
    names = list(header)
    texts = ([str(cell).replace("|", r"\|") for cell in row] for row in [names, ["---"] * len(names), *rows])
    return "\n".join(f"| {' | '.join(row)} |" for row in texts)
