"""What a PDF says, page by page."""

from pathlib import Path

import pypdfium2


def pages_of(pdf: bytes | Path) -> list[str]:
    """The text of each page. PDFium has a mark of its own for a hyphen that ends a line."""
    with pypdfium2.PdfDocument(pdf) as document:
        texts = [page.get_textpage().get_text_bounded() for page in document]
    return [text.replace("\r\n", "\n").replace("\x02", "-") for text in texts]


def widths(pdf: bytes) -> list[tuple[float, float, float]]:
    """Where each piece of text begins and ends, and the width of its page."""
    result = []
    with pypdfium2.PdfDocument(pdf) as document:
        for page in document:
            text = page.get_textpage()
            boxes = (text.get_rect(place) for place in range(text.count_rects()))
            result += [(box[0], box[2], page.get_width()) for box in boxes]
    return result


def edges(pdf: bytes, words: str) -> tuple[float, float]:
    """Where this text of the first page begins and ends."""
    with pypdfium2.PdfDocument(pdf) as document:
        text = document[0].get_textpage()
        start, count = text.search(words).get_next()
        return text.get_charbox(start)[0], text.get_charbox(start + count - 1)[2]


def first_differences(one: str, other: str, most: int = 5) -> list[tuple[str, str]]:
    """Lines that differ, some of them: pytest's own comparison of two whole reports takes hours."""
    lines, others = one.splitlines(), other.splitlines()
    apart = [pair for pair in zip(lines, others, strict=False) if pair[0] != pair[1]]
    if not apart and len(lines) != len(others):
        return [(f"{len(lines)} lines", f"{len(others)} lines")]
    return apart[:most]
