"""What was measured, on disk, and what is shown of it: tables and the plan of a run, rows, numbers, cells, the report.

    from helpers.book import build, read
    read("nvidia-h200", "rush", "ladder")                 # a frame of rows
    build(execute=False)                                  # report.pdf from the outputs as committed

    jupyter nbconvert --to dlspeed.book.ReportExporter notebooks/01_amp.ipynb

nbconvert reads the notebooks, pandoc converts their text, Typst sets the pages, pikepdf packs them, all as Python
packages: no LaTeX, browser, network or font of the system, so the same notebooks give the same bytes everywhere.
Converting a notebook takes well under a second; what takes time is executing it.
"""

from ..boot import when_used

# Reading needs pandas; cells and figures need matplotlib, and only the report nbconvert: each loads what it needs.
NAMES = {
    "build": "build",
    "pages": "BuildError ReportExporter",
    "runner": "measure",
    "store": "RecordError devices folder read read_rows summary",
    "table": "Table Worth",
    "figures": "",
    "notebook": "",
}
__all__ = ["figures", "notebook", *" ".join(NAMES.values()).split()]
__getattr__ = when_used(__name__, NAMES)
