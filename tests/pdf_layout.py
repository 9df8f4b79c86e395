"""How the pages of a PDF are filled: what stands out of the margins, headings without text, pages left empty.

Lengths are in points, from the lower left corner, as PDF counts them. Chapters are the bookmarks of the first level.
"""

from pathlib import Path

import pypdfium2
from pypdfium2 import raw

MM = 72 / 25.4
SIDE, TOP, BOTTOM = 18 * MM, 15 * MM, 18 * MM  # the margins in templates/report/style.typ
HANGING = 6  # points that a comma or a hyphen may hang over the edge of a line


def beyond_margins(pdf: bytes | Path) -> list[tuple[int, str]]:
    """Lines of text and rules of tables that begin or end outside the margins, each with its page."""
    result = []
    with pypdfium2.PdfDocument(pdf) as document:
        for number, page in enumerate(document, 1):
            left, right = SIDE, page.get_width() - SIDE
            text = page.get_textpage()
            for box in (text.get_rect(place) for place in range(text.count_rects())):
                if box[0] < left - HANGING or box[2] > right + HANGING:
                    result.append((number, text.get_text_bounded(*box)))
            # Only rules: a bar of a figure may begin far outside of what the figure shows of it.
            paths = (drawn.get_bounds() for drawn in page.get_objects([raw.FPDF_PAGEOBJ_PATH]))
            rules = [box for box in paths if box[3] - box[1] < 2]
            if any(box[0] < left - 1.5 or box[2] > right + 1.5 for box in rules):
                result.append((number, "a rule"))
    return result


def parted_headings(pdf: bytes | Path) -> list[tuple[int, str]]:
    """Headings below which there is nothing but other headings on their page, each with its page."""
    parted = []
    with pypdfium2.PdfDocument(pdf) as document:
        headings = [(mark.get_title(), mark.get_dest()) for mark in document.get_toc()]
        for title, at in headings:
            here, height = at.get_index(), at.get_view()[1][1]
            page = document[here]
            text = page.get_textpage().get_text_bounded(0, BOTTOM - 3, page.get_width(), height + 3)
            below = [name for name, to in headings if to.get_index() == here and to.get_view()[1][1] <= height]
            if len("".join(text.split())) <= len("".join("".join(below).split())):
                parted.append((here + 1, title))
    return parted


def short_pages(pdf: bytes | Path, least: float = 0.25) -> list[tuple[int, float]]:
    """Pages whose text ends above this share of their height, and the share; not those that end a chapter."""
    short = []
    with pypdfium2.PdfDocument(pdf) as document:
        begins = {mark.get_dest().get_index() for mark in document.get_toc() if mark.level == 0} | {len(document)}
        for place, page in enumerate(document):
            text, height = page.get_textpage(), page.get_height()
            bottoms = [text.get_rect(each)[1] for each in range(text.count_rects())]
            lowest = min((bottom for bottom in bottoms if bottom > BOTTOM - 3), default=height - TOP)
            share = (height - TOP - lowest) / (height - TOP - BOTTOM)
            if share < least and place + 1 not in begins:
                short.append((place + 1, round(share, 2)))
    return short
