"""The build of the report: what it executes, what it writes, and that it writes nothing when something is wrong."""

import json
import os
import signal
import sys
from pathlib import Path

import nbformat
import nbformat.v4 as v4
import pytest

from helpers.book import BuildError, build
from helpers.book.build import BEGIN, END
from helpers.cli import main

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="30"><rect width="40" height="30"/></svg>'


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of its own."""
    monkeypatch.setenv("HELPERS_ROOT", str(tmp_path))
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "figures").mkdir()
    return tmp_path


def write(project, name, *cells):
    path = project / "notebooks" / f"{name}.ipynb"
    made = [v4.new_markdown_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    nbformat.write(v4.new_notebook(cells=made), path)
    return path


def code(source, *outputs, tags=()):
    count = 1 if outputs else None
    return v4.new_code_cell(source, outputs=list(outputs), execution_count=count, metadata={"tags": list(tags)})


def printed(text):
    return v4.new_output("stream", name="stdout", text=text)


def drawn(name, svg=SVG):
    note = {"helpers": {"figure": name, "caption": f"Caption of {name}"}}
    return v4.new_output("display_data", data={"image/svg+xml": svg}, metadata=note)


def files(project):
    return {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}


def test_a_full_build_executes_all_and_writes_all(project, pages, monkeypatch, capfd):
    other = project / "jupyter" / "kernels" / "python3"  # another Python's kernel, which isn't used
    other.mkdir(parents=True)
    (other / "kernel.json").write_text(json.dumps({"argv": ["false"], "display_name": "x", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(project / "jupyter"))
    draw = f"""
import os, pathlib, sys
from IPython.display import display
note = {{'helpers': {{'figure': 'speed', 'caption': 'Tokens'}}}}
display({{'image/svg+xml': {SVG!r}}}, raw=True, metadata=note)
print(pathlib.Path.cwd().name, os.environ['HELPERS_RESULTS'], sys.executable, file=sys.stdout)
print('to stderr', file=sys.stderr)
"""
    second = write(project, "02_second", "# Second", code(draw))
    write(project, "01_first", "# First", code(""), code("x = 20"), code("x + 1"))
    (project / "figures" / "old.svg").write_text(SVG)
    (project / "figures" / "photo.png").write_bytes(b"kept")

    output = build(results=project / "mine", save_notebooks=True)

    assert output == project / "report.pdf"
    report = pages(output.read_bytes())
    assert report.text.index("1 First") < report.text.index("2 Second")
    assert "21" in report.pages[0]
    assert f"notebooks{project / 'mine'}{sys.executable}" in report.flat
    assert "Figure 1. Tokens" in report.text and "stderr" not in report.text
    assert sorted(path.name for path in (project / "figures").iterdir()) == ["photo.png", "speed.svg"]
    assert (project / "figures" / "speed.svg").read_text() == SVG
    assert "3/3" in capfd.readouterr().err  # the cell without code is not run

    saved = json.loads(second.read_text())
    cell = saved["cells"][1]
    assert cell["execution_count"] == 1 and cell["metadata"] == {}
    assert [output["output_type"] for output in cell["outputs"]] == ["display_data", "stream"]
    assert saved["metadata"]["kernelspec"]["name"] == "python3"
    again = build(execute=False, output=project / "again.pdf", results=project / "mine")
    assert again.read_bytes() == output.read_bytes()


def test_a_sentence_that_its_records_no_longer_bear_is_listed(project, capsys, pages):
    note = v4.new_output("display_data", data={}, metadata={"helpers": {"report": False, "outdated": "It pays."}})
    write(project, "01_first", "# First", code("claim()", note, printed("the outcome")))
    report = pages(build(execute=False).read_bytes())
    assert capsys.readouterr().err == "no longer so, by its records: It pays.\n"
    assert "the outcome" in report.text and "It pays" not in report.text


def test_the_machines_of_a_folder_of_records_are_shown_in_place_of_those_that_notebooks_name(project, pages):
    for machine in ("cpu-mine", "nvidia-mine"):
        (project / "mine" / machine).mkdir(parents=True)
        (project / "mine" / machine / "table.csv").write_text("")
    write(project, "01_first", "# First", code("GPU, CPU = 'theirs', 'cpu-theirs'"), code("f'shown: {GPU} {CPU}'"))
    assert "shown:nvidia-minecpu-mine" in pages(build(results=project / "mine").read_bytes()).flat
    assert "shown:theirscpu-theirs" in pages(build().read_bytes()).flat
    (project / "mine" / "cpu-other").mkdir()
    (project / "mine" / "cpu-other" / "table.csv").write_text("")
    with pytest.raises(BuildError, match="several machines of a kind"):
        build(results=project / "mine")


def test_a_notebook_that_fails_is_named_and_changes_nothing(project):
    write(project, "01_first", "# Fine")
    failing = [code(""), code("1 / 0", tags=["raises-exception"]), "text", code("raise KeyError('a\\n  b')")]
    write(project, "02_second", "# T", *failing, code("print('never')"))
    (project / "report.pdf").write_bytes(b"old")
    (project / "figures" / "old.svg").write_text(SVG)
    before = files(project)
    with pytest.raises(BuildError, match=r"^02_second\.ipynb: In \[2\]: KeyError: 'a\\n b'$"):
        build(save_notebooks=True)
    assert files(project) == before


def test_a_kernel_that_dies_is_an_error_of_its_cell(project):
    write(project, "01_first", code("x = 1"), code("import os; os._exit(1)"), code("y", printed("stale")))
    with pytest.raises(BuildError, match=r"01_first\.ipynb: In \[2\]: the kernel died"):
        build()


def test_without_execution_the_committed_outputs_are_used_and_figures_rewritten(project, pages):
    failure = v4.new_output("error", ename="ValueError", evalue="no such size", traceback=[])
    headline = v4.new_output("display_data", {"text/markdown": "new"}, metadata={"helpers": {"readme": True}})
    expected = code("x", failure, tags=["raises-exception"])
    write(project, "01_first", "# First", code("lost()", printed("from before"), drawn("speed")), expected)
    write(project, "02_second", code("y", headline))
    (project / "figures" / "other.svg").write_text(SVG)
    (project / "README.md").write_text(f"{BEGIN}old{END}")
    report = pages(build(execute=False).read_bytes())
    assert "from before" in report.text and "Figure 1. Caption of speed" in report.text
    assert "ValueError: no such size" in report.text
    assert (project / "figures" / "speed.svg").read_text() == SVG
    assert (project / "figures" / "other.svg").exists()
    assert (project / "README.md").read_text() == f"{BEGIN}\n\nnew\n\n{END}"


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([code("x")], r"01_first\.ipynb: it has not been executed"),
        ([code("x", printed("1")), code("y")], r"01_first\.ipynb: it has not been executed"),
        (
            [code("x", printed("1")), code("y", v4.new_output("error", ename="E", evalue="no", traceback=[]))],
            r"01_first\.ipynb: In \[2\]: E: no",
        ),
        (["![x](none.svg)"], r"01_first\.ipynb: Typst cannot compile it: file not found"),
        (["$\\nosuchmacro$"], r"01_first\.ipynb: this TeX cannot be set: \\nosuchmacro"),
        ([code("x", drawn("a"), drawn("a", SVG + " "))], r"01_first\.ipynb: another figure is called a\.svg"),
        ([code("x", drawn("broken", "<svg"))], r"01_first\.ipynb: Typst cannot compile it"),
    ],
    ids=["not executed", "executed in part", "error", "image", "tex", "same name", "broken figure"],
)
def test_what_is_wrong_is_said_with_its_place_and_nothing_is_written(cells, message, project):
    write(project, "01_first", *cells)
    write(project, "02_second", "# Fine")
    (project / "report.pdf").write_bytes(b"old")
    before = files(project)
    with pytest.raises(BuildError, match=message):
        build(execute=False)
    assert files(project) == before


def test_the_first_chapter_comes_before_the_contents_and_the_appendix_last(project, pages):
    goals = v4.new_markdown_cell("## Goals", metadata={"tags": ["appendix"]})
    write(project, "00_summary", "# Summary\n\n## Findings", goals)
    part = v4.new_markdown_cell("## Another part", metadata={"tags": ["new-page"]})
    write(project, "04_fourth", "# Fourth\n\n## Part", part)
    report = pages(build(execute=False).read_bytes())
    first, second = report.pages
    assert first.startswith("Summary\nFindings") and "Goals" not in first
    contents, fourth = first.split("\n4 Fourth\n4.1 Part")  # a chapter begins where there is room
    assert "Contents" in contents and "Part" not in contents and "Another" not in fourth
    another, appendix = second.split("\nAppendix\n")
    assert another.startswith("4.2 Another part") and "Goals" in appendix


def test_a_chapter_begins_a_page_where_less_than_a_quarter_of_one_is_left(project, pages):
    for paragraphs in (32, 42):
        write(project, "01_first", "# First\n\n" + "Words of a paragraph.\n\n" * paragraphs)
        write(project, "02_second", "# Second\n\nText.")
        text = pages(build(execute=False).read_bytes()).pages
        assert text[-1].startswith("2 Second") == (paragraphs == 42)


def test_where_nothing_can_be_written_no_notebook_runs(project):
    path = write(project, "01_first", code("open('ran', 'w')"))
    (project / "file").write_text("")
    with pytest.raises(OSError):
        build(output=project / "file" / "report.pdf")
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_project_that_is_read_only_gives_a_report_elsewhere_and_names_what_it_cannot_write(project, monkeypatch):
    write(project, "01_first", code("x", drawn("speed")))
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) not in (project, project / "figures"))
    with pytest.raises(OSError, match=r"can't be written: name another place \(--output\)$"):
        build(execute=False)
    before = files(project)
    elsewhere = project.parent / f"{project.name}-elsewhere" / "report.pdf"
    assert build(execute=False, output=elsewhere).stat().st_size > 0
    assert files(project) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_with_one_line_and_changes_nothing(project, capfd, number):
    write(project, "01_first", "# T", code(f"import os, time; os.kill(os.getppid(), {number:d}); time.sleep(60)"))
    before = files(project)
    assert main(["report"]) == 128 + number
    assert capfd.readouterr().err.splitlines()[-1].endswith(": stopped; nothing was written")
    assert files(project) == before
