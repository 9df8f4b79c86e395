"""`dlspeed`: this folder, loaded by its location, whatever Python's path holds and the checkout calls it.

    python -c "import runpy; runpy.run_path('…/boot.py')['load'](); from dlspeed.lab import device"

A training project often has a `helpers` of its own, and an installed one may be another version: all commands and the
processes that they start use this name. Needs nothing but Python's library, and bends no path.
"""

import importlib.util
import sys
from pathlib import Path

NAME, FOLDER = "dlspeed", Path(__file__).resolve().parent


def load() -> None:
    """Make `import dlspeed` find this folder in this process, also if another one is installed."""
    known = sys.modules.get(NAME)
    if known is not None and list(known.__path__) == [str(FOLDER)]:
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location(
        NAME, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    sys.modules[NAME] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
