"""What scripts and records say stays what it is in Markdown, read by a parser of GitHub's kind."""

import html
import re

import pypandoc
import pytest

from helpers.lab import markdown

TEXTS = [
    "a|b", r"re.split(r'\|', x)", "`x`", "``", "f'`{x}``'", "<script>alert(1)</script>", "[a](b) *c* _d_ $e$",
    "@somebody #12 https://example.org", "&amp; \\", "a  b",
]  # fmt: skip


def shown(text: str) -> str:
    return pypandoc.convert_text(text, "html", format="gfm", extra_args=["--wrap=none"])


@pytest.fixture(scope="module")
def cells() -> list[str]:
    page = shown(markdown.table(["code", "text"], [(markdown.code(text), "x") for text in TEXTS]))
    return re.findall(r"<td[^>]*>(.*?)</td>", page, re.DOTALL)


@pytest.mark.parametrize("place", range(len(TEXTS)), ids=TEXTS)
def test_code_in_a_table_is_shown_as_it_is(place, cells):
    assert len(cells) == 2 * len(TEXTS)
    assert cells[2 * place] == f"<code>{html.escape(' '.join(TEXTS[place].split()), quote=False)}</code>"


def test_code_in_a_sentence_stays_in_its_line():
    assert shown(f"a {markdown.code(chr(10).join(['x', '', '# y']))} b").strip() == "<p>a <code>x # y</code> b</p>"


def test_escaped_text_has_no_markup():
    text = r"[a](b) *c* _d_ <i>e</i> `f` \g $h$ | i"
    assert html.unescape(shown(markdown.escaped(text)).strip()) == f"<p>{text}</p>"
