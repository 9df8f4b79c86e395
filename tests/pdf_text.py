"""What a PDF says, page by page."""

from pathlib import Path

import pypdfium2


def pages_of(pdf: bytes | Path) -> list[str]:
    """The text of each page. PDFium has a mark of its own for a hyphen that ends a line."""
    with pypdfium2.PdfDocument(pdf) as document:
        texts = [page.get_textpage().get_text_bounded() for page in document]
    return [text.replace("\r\n", "\n").replace("\x02", "-") for text in texts]


def boxes(pdf: bytes) -> list[tuple[float, float]]:
    """Where each piece of text begins, and the width of its page."""
    found = []
    with pypdfium2.PdfDocument(pdf) as document:
        for page in document:
            text = page.get_textpage()
            found += [(text.get_rect(place)[0], page.get_width()) for place in range(text.count_rects())]
    return found


def first_differences(one: str, other: str, most: int = 5) -> list[tuple[str, str]]:
    """Lines that differ, some of them: pytest's own comparison of two whole reports takes hours."""
    lines, others = one.splitlines(), other.splitlines()
    apart = [pair for pair in zip(lines, others, strict=False) if pair[0] != pair[1]]
    if not apart and len(lines) != len(others):
        return [(f"{len(lines)} lines", f"{len(others)} lines")]
    return apart[:most]
