"""Changes tried on somebody's training script as it is: what each one did, and the edit that does the same.

print(try_script("train.py", ["--epochs", "3"], seconds=300))
"""

from .search import try_script

__all__ = ["try_script"]
