"""What the first cell of each notebook runs: `helpers` is the checkout's, here and in processes started here.

It installs what a hosted machine lacks, and leaves its torch as it is.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

root = Path.cwd() if Path("requirements-notebook.txt").is_file() else Path.cwd().parent
if str(root) not in sys.path:
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
needed = ("IPython", "matplotlib", "numpy", "pandas", "PIL", "torchtext", "tqdm")
if any(importlib.util.find_spec(name) is None for name in needed):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "-r", str(root / "requirements-notebook.txt")]
    subprocess.run(pip, check=True)
