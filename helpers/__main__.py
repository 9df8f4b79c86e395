"""`python -m helpers` in a checkout is the command `dlspeed`, under this name, so that `helpers` is left to the script.

Processes that it spawns run this file by its path, as `__mp_main__`, and find `dlspeed` then.
"""

import runpy
import sys
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name("boot.py")))["load"]()

if __name__ == "__main__":
    for name in [name for name in sys.modules if name.partition(".")[0] == "helpers"]:
        del sys.modules[name]
    sys.modules["__main__"].__spec__ = None  # multiprocessing imports a main module by its file where it has no spec
    from dlspeed.cli import main

    sys.exit(main())
