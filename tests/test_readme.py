"""The snippets and samples of README.md and USING.md do what they show, and what the pages name exists."""

import doctest
import re
import shlex
from pathlib import Path

import pytest

from helpers.cli import main

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "USING.md", "CONTRIBUTING.md")}
README = PAGES["README.md"]
SAMPLES = re.findall(r"```\n\$ dlspeed (.*?)\n(.*?)```", README, re.DOTALL)
LINKS = {link for text in PAGES.values() for link in re.findall(r"\]\(([^)#]+)(#[^)]*)?\)", text)}


# In the checkout, and where it is installed
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "package"), [("README.md", "helpers"), ("README.md", "dlspeed"), ("USING.md", "helpers")]
)
def test_the_snippets_type_in_and_answer_as_shown(name, package):
    blocks = re.findall(r"```python\n(.*?)```", PAGES[name], re.DOTALL)
    source = "\n".join(blocks).replace("from helpers", f"from {package}")
    snippets = doctest.DocTestParser().get_doctest(source, {}, name, name, 0)
    assert len(snippets.examples) >= 10
    failures = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(snippets).failed
    assert failures == 0


@pytest.mark.long
@pytest.mark.parametrize(("command", "shown"), SAMPLES, ids=[command.split()[0] for command, _ in SAMPLES])
def test_a_command_prints_what_the_readme_shows(command, shown, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    main(shlex.split(command))
    printed = capsys.readouterr().out
    assert doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS), printed


def test_samples_are_found():
    assert [command.split()[0] for command, _ in SAMPLES] == ["fit", "grade"]


def heading(line: str) -> str:
    """The anchor that Markdown's readers give a heading."""
    return "#" + re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")


@pytest.mark.parametrize(("target", "anchor"), sorted(LINKS))
def test_every_link_leads_somewhere(target, anchor):
    assert (ROOT / target).exists()
    if anchor and target in PAGES:
        assert anchor in {heading(line) for line in PAGES[target].splitlines() if line.startswith("#")}


def test_every_notebook_is_in_the_list():
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{notebook.name}" in README


def test_commands_of_make_exist():
    targets = set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text()))
    assert set(re.findall(r"(?m)^make (\w+)", README)) <= targets
