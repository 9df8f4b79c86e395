"""The build of the report: what it executes, what it writes, and that it writes nothing when something is wrong."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import nbformat.v4 as v4
import pytest
from nbconvert.nbconvertapp import NbConvertApp

from helpers.__main__ import main
from helpers.lab.report import BuildError, build, execute
from helpers.lab.report.build import BEGIN, END, _replace_all

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="30"><rect width="40" height="30"/></svg>'
ROOT = Path(__file__).parents[3]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of its own."""
    monkeypatch.setenv("HELPERS_ROOT", str(tmp_path))
    monkeypatch.setattr("helpers.lab.machine.project_root", lambda: tmp_path)
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


def test_a_full_build_executes_all_and_writes_all(project, pages, capfd):
    draw = f"""
import os, pathlib, sys
from IPython.display import display
pathlib.Path(os.environ['HELPERS_FIGURES'], 'speed.svg').write_text({SVG!r})
note = {{'helpers': {{'figure': 'speed', 'caption': 'Tokens'}}}}
display({{'image/svg+xml': {SVG!r}}}, raw=True, metadata=note)
print(pathlib.Path.cwd().name, os.environ['HELPERS_RESULTS'], file=sys.stdout)
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
    assert f"notebooks{project / 'mine'}" in report.flat
    assert "Figure 1. Tokens" in report.text and "stderr" not in report.text
    assert sorted(path.name for path in (project / "figures").iterdir()) == ["photo.png", "speed.svg"]
    assert "3/3" in capfd.readouterr().err  # the cell without code is not run

    saved = json.loads(second.read_text())
    cell = saved["cells"][1]
    assert cell["execution_count"] == 1 and cell["metadata"] == {}
    assert [output["output_type"] for output in cell["outputs"]] == ["display_data", "stream"]
    assert saved["metadata"]["kernelspec"]["name"] == "python3"
    again = build(execute=False, output=project / "again.pdf", results=project / "mine")
    assert again.read_bytes() == output.read_bytes()


def test_a_notebook_that_fails_is_named_and_changes_nothing(project):
    write(project, "01_first", code("print(1)"))
    write(
        project,
        "02_second",
        "# T",
        code(f"import os; open(os.environ['HELPERS_FIGURES'] + '/new.svg', 'w').write({SVG!r})"),
        code(""),
        code("1 / 0", tags=["raises-exception"]),
        "text",
        code("{}['lost']"),
        code("print('never')"),
    )
    (project / "report.pdf").write_bytes(b"old")
    (project / "figures" / "old.svg").write_text(SVG)
    before = files(project)
    with pytest.raises(BuildError, match=r"^02_second\.ipynb: In \[3\]: KeyError: 'lost'$"):
        build(save_notebooks=True, progress=False)
    assert files(project) == before


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ValueError('a\\nb\\n  c')", "In [1]: ValueError: a b c"),
        (
            "from IPython.display import Image\nImage('nope.png')",
            "No such file or directory: 'nope.png'",
        ),
    ],
)
def test_an_error_of_many_lines_is_said_in_one(project, source, said):
    write(project, "01_bad", code(source))
    with pytest.raises(BuildError) as error:
        build(progress=False)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_notebook_that_was_executed_in_part_is_not_taken_for_whole(project):
    half = code("print(1)", printed("1"))
    half.execution_count = 1
    write(project, "01_half", half, code("print(2)"))
    with pytest.raises(BuildError, match="has not been executed"):
        build(execute=False, progress=False)


def test_a_kernel_that_dies_is_an_error_of_its_cell(project):
    write(project, "01_first", code("x = 1"), code("import os; os._exit(1)"), code("y", printed("stale")))
    with pytest.raises(BuildError, match=r"01_first\.ipynb: In \[2\]: the kernel died"):
        build(progress=False)


def test_the_kernel_is_this_python_whatever_kernels_are_installed(project, pages, monkeypatch):
    other = project / "jupyter" / "kernels" / "python3"
    other.mkdir(parents=True)
    (other / "kernel.json").write_text(json.dumps({"argv": ["false"], "display_name": "x", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(project / "jupyter"))
    write(
        project,
        "01_first",
        code("import sys, helpers; print(sys.executable, helpers.__file__)"),
    )
    report = pages(build(progress=False).read_bytes())
    assert f"{sys.executable}{ROOT}/helpers/__init__.py" in report.flat


def test_without_execution_the_committed_outputs_are_used_and_figures_rewritten(project, pages):
    write(project, "01_first", "# First", code("lost()", printed("from before"), drawn("speed")))
    (project / "figures" / "other.svg").write_text(SVG)
    report = pages(build(execute=False).read_bytes())
    assert "from before" in report.text and "Figure 1. Caption of speed" in report.text
    assert (project / "figures" / "speed.svg").read_text() == SVG
    assert (project / "figures" / "other.svg").exists()


def test_the_same_notebooks_give_the_same_bytes(project):
    write(project, "01_first", "# T $x^2$", code("x", printed("1"), drawn("speed")))
    first = build(execute=False, output=project / "a.pdf").read_bytes()
    assert build(execute=False, output=project / "b.pdf").read_bytes() == first


def failure(**error):
    return v4.new_output("error", ename="ValueError", evalue="no such size", traceback=[])


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([code("x")], r"01_first\.ipynb: it has not been executed"),
        (
            [code("x", printed("1")), code("y", failure())],
            r"01_first\.ipynb: In \[2\]: ValueError: no such size",
        ),
        (["![x](none.svg)"], r"01_first\.ipynb: Markdown cell 1: the image none\.svg does not exist"),
        (["$\\nosuchmacro$"], r"01_first\.ipynb: this TeX cannot be set: \\nosuchmacro"),
        ([code("x", drawn("a")), code("y", drawn("a", SVG + " "))], r"In \[2\]: another figure is called a"),
        ([code("x", drawn("broken", "<svg"))], r"01_first\.ipynb: Typst cannot compile it"),
    ],
    ids=["not executed", "error", "image", "tex", "same name", "broken figure"],
)
def test_what_is_wrong_is_said_with_its_place_and_nothing_is_written(cells, message, project):
    write(project, "01_first", *cells)
    write(project, "02_second", "# Fine")
    (project / "report.pdf").write_bytes(b"old")
    before = files(project)
    with pytest.raises(BuildError, match=message):
        build(execute=False)
    assert files(project) == before


def test_an_expected_error_is_shown(project, pages):
    write(project, "01_first", code("x", failure(), tags=["raises-exception"]))
    assert "ValueError: no such size" in pages(build(execute=False).read_bytes()).text


def test_one_figure_name_in_two_notebooks_is_an_error(project):
    write(project, "01_first", code("x", drawn("speed")))
    write(project, "02_second", code("x", drawn("speed", SVG + " ")))
    with pytest.raises(BuildError, match=r"02_second\.ipynb: a figure of 01_first\.ipynb is called speed too"):
        build(execute=False)


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_what_is_no_notebook_is_an_error(content, project):
    path = project / "notebooks" / "03_odd.ipynb"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BuildError, match=r"03_odd\.ipynb"):
        build([path], execute=False)


def test_the_first_chapter_comes_before_the_contents_and_what_is_tagged_appendix_last(project, pages):
    goals = nbformat.v4.new_markdown_cell("## Goals", metadata={"tags": ["appendix"]})
    write(project, "00_summary", "# Summary\n\n## Findings", goals)
    decide = nbformat.v4.new_markdown_cell("## Another part", metadata={"tags": ["new-page"]})
    write(project, "04_fourth", "# Fourth\n\n## Part", decide)
    report = pages(build(execute=False).read_bytes())
    assert report.pages[0].startswith("Summary\nFindings") and "Goals" not in report.pages[0]
    assert "Contents" in report.pages[1] and "4.1 Part" in report.pages[1]
    assert report.pages[2].startswith("4 Fourth\n4.1 Part") and "Another" not in report.pages[2]
    assert report.pages[3].startswith("4.2 Another part")
    assert report.pages[4].startswith("Appendix\nGoals")


def test_nbconvert_exports_one_notebook(project, pages):
    path = write(project, "04_fourth", "# Fourth", code("x", printed("out")))
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--to", "helpers.lab.report.ReportExporter"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = pages(path.with_suffix(".pdf").read_bytes())
    assert report.pages[0].startswith("4 Fourth\nout")


def test_nbconvert_exits_with_an_error_when_an_image_is_missing(project):
    path = write(project, "04_fourth", "![x](none.svg)")
    app = NbConvertApp()
    app.initialize(["--to", "helpers.lab.report.ReportExporter", str(path)])
    with pytest.raises(SystemExit) as exit:
        app.start()
    assert exit.value.code == 1
    assert not path.with_suffix(".pdf").exists()


def test_what_nobody_has_measured_is_one_list_at_the_end(project, pages):
    output = nbformat.v4.new_output(
        "display_data",
        {"text/markdown": "*Not measured yet.*"},
        metadata={
            "helpers": {"report": False, "waiting": "amp/quality", "about": "A whole training run: its accuracy."}
        },
    )
    write(project, "04_fourth", "# Fourth", code("results(e)", output))
    report = pages(build(execute=False).read_bytes())
    assert "Not measured yet" not in report.pages[0]
    assert "amp/quality" in report.pages[-1] and "A whole training run: its accuracy" in report.pages[-1]


@pytest.fixture
def failing(monkeypatch):
    """Let the n-th renaming from now on fail."""
    replace = os.replace

    def fail(at, error):
        count = itertools.count()

        def renamed(source, target):
            if next(count) == at:
                raise error
            replace(source, target)

        monkeypatch.setattr("os.replace", renamed)

    return fail


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_files_change_all_or_none_whichever_renaming_fails(error, tmp_path, failing):
    (tmp_path / "changed").write_bytes(b"old")
    (tmp_path / "removed").write_bytes(b"old")
    new = {tmp_path / "changed": b"new", tmp_path / "folder" / "added": b"new", tmp_path / "removed": None}
    for at in range(6):  # each is written, what it replaces is renamed, and it is renamed
        before = files(tmp_path)
        failing(at, error)
        with pytest.raises(type(error)):
            _replace_all(new)
        assert files(tmp_path) == before
    _replace_all(new)
    assert files(tmp_path) == {path: content for path, content in new.items() if content is not None}


def test_report_readme_and_figures_change_together(project, failing):
    headline = v4.new_output("display_data", {"text/markdown": "new"}, metadata={"helpers": {"readme": True}})
    write(project, "01_first", "# T", code("x", drawn("speed")), code("y", headline))
    (project / "README.md").write_text(f"{BEGIN}old{END}")
    (project / "report.pdf").write_bytes(b"old")
    before = files(project)
    for at in range(8):
        failing(at, OSError(28, "No space left on device"))
        with pytest.raises(OSError, match="No space"):
            build(execute=False)
        assert files(project) == before
    build(execute=False)
    assert "new" in (project / "README.md").read_text() and (project / "figures" / "speed.svg").exists()


def test_a_figure_that_cannot_be_written_leaves_the_report_as_it_was(project):
    write(project, "01_first", "# T", code("x", drawn("speed")))
    (project / "report.pdf").write_bytes(b"old")
    (project / "figures" / "speed.svg").mkdir()
    before = files(project)
    with pytest.raises(IsADirectoryError, match=r"speed\.svg"):
        build(execute=False)
    assert files(project) == before


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that nobody can write")
def test_a_folder_that_cannot_be_written_is_found_before_a_notebook_runs(project):
    path = write(project, "01_first", code("open('ran', 'w')"))
    with pytest.raises(BuildError, match=r"/proc/report: cannot be written \(.*\)"):
        build(output="/proc/report/report.pdf", progress=False)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_ctrl_c_stops_with_one_line_and_changes_nothing(project, capfd):
    write(project, "01_first", "# T", code("import os, signal, time; os.kill(os.getppid(), 2); time.sleep(60)"))
    before = files(project)
    assert main(["report"]) == 130
    assert capfd.readouterr().err.splitlines()[-1] == "python -m helpers: stopped; nothing was written"
    assert files(project) == before


def test_a_cell_may_run_as_long_as_it_takes(project, monkeypatch):
    """What it measures has a budget of its own."""
    limits = []
    monkeypatch.setattr(execute._Client, "run", lambda client, environment: limits.append(client.timeout))
    build([write(project, "01_long", code("x = 1"))], output=project / "a.pdf", progress=False)
    assert limits == [None]
