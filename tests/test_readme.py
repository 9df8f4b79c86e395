"""The README's snippets do what they show, and what it names exists."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("package", ["helpers", "dlspeed"])  # in the checkout, and where it is installed
def test_the_snippets_type_in_and_answer_as_shown(package):
    source = "\n".join(BLOCKS).replace("from helpers", f"from {package}")
    snippets = doctest.DocTestParser().get_doctest(source, {}, "README", "README.md", 0)
    assert len(snippets.examples) >= 10
    failures = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(snippets).failed
    assert failures == 0


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_every_link_leads_somewhere(target):
    assert (ROOT / target).exists()


def test_every_notebook_is_in_the_list():
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{notebook.name}" in README


def test_commands_of_make_exist():
    targets = set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text()))
    assert set(re.findall(r"(?m)^make (\w+)", README)) <= targets
