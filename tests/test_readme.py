"""The snippets of README and USING do what they show, and what they name exists."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "USING.md")}
README = PAGES["README.md"]


@pytest.mark.parametrize("package", ["helpers", "dlspeed"])  # in the checkout, and where it is installed
@pytest.mark.parametrize("page", PAGES)
def test_the_snippets_type_in_and_answer_as_shown(page, package):
    blocks = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
    source = "\n".join(blocks).replace("from helpers", f"from {package}")
    snippets = doctest.DocTestParser().get_doctest(source, {}, page, page, 0)
    assert len(snippets.examples) >= 10
    failures = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(snippets).failed
    assert failures == 0


@pytest.mark.parametrize(
    "target", sorted({target for text in PAGES.values() for target in re.findall(r"\]\(([^)#]+)\)", text)})
)
def test_every_link_leads_somewhere(target):
    assert (ROOT / target).exists()


def test_every_notebook_is_in_the_list():
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{notebook.name}" in README


def test_commands_of_make_exist():
    targets = set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text()))
    assert set(re.findall(r"(?m)^make (\w+)", "".join(PAGES.values()))) <= targets
