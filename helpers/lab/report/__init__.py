"""Notebooks become one PDF: nbconvert reads them, pandoc converts their text, Typst sets the pages, pikepdf packs them.

    from helpers.lab.report import build
    build(execute=False)                                  # report.pdf from the outputs as committed

    jupyter nbconvert --to dlspeed.lab.report.ReportExporter notebooks/01_amp.ipynb

No LaTeX, no browser, no network and no fonts of the system: `pandoc`, `typst` and `pikepdf` are Python packages, so
the same notebooks give the same bytes everywhere. Converting a notebook takes well under a second; what
takes time is executing it.
"""

from ...boot import when_used

__all__ = ["BuildError", "ReportExporter", "build"]

# Figures and notebooks need no nbconvert: what does is loaded when it is used.
__getattr__ = when_used(__name__, {"build": "build", "convert": "BuildError", "exporter": "ReportExporter"})
