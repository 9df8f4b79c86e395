"""`dlspeed`: this folder, loaded by its location, whatever Python's path holds and the checkout calls it.

    python -c "import runpy; runpy.run_path('…/boot.py')['load'](); from dlspeed.lab import device"

A training project often has a `helpers` of its own, and an installed one may be another version: all commands and the
processes that they start use this name. Needs nothing but Python's library, and bends no path.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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


def program(module: str) -> str:
    """Code for `python -c` that runs `main` of one of this package's modules with the next argument."""
    start = f"import runpy, sys; runpy.run_path({str(FOLDER / 'boot.py')!r})['load'](); "
    return f"{start}from {NAME}.{module} import main; main(sys.argv[1])"


def when_used(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`: these modules' names, or modules that have none here, are loaded when first used.

    So a process of somebody's script loads torch and numpy only, whatever else its environment has.
    """
    of = {name: module for module, names in modules.items() for name in names.split() or [module.rpartition(".")[2]]}

    def load_name(name: str) -> Any:
        if name not in of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = importlib.import_module(f"{package}.{of[name]}")
        value = getattr(value, name) if modules[of[name]] else value
        setattr(sys.modules[package], name, value)  # in place of a module of that name
        return value

    return load_name
