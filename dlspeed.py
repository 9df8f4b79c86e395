"""The command `dlspeed`: `helpers.__main__` of this file's folder, whatever else Python would import as `helpers`.

A training project often has a `helpers` of its own, which PYTHONPATH puts first.
"""

import sys
from pathlib import Path


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import helpers  # its own modules are found by its path from now on  # noqa: F401

    del sys.path[0]
    from helpers.__main__ import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
