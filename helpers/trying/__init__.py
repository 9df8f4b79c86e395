"""Changes tried on somebody's training script as it is: what each one did, and the edit that does the same.

print(try_script("train.py", ["--epochs", "3"], seconds=300))
print(try_edited("train.py", [], "edited.py", []))             # the same for an edit made by hand
"""

from ..boot import when_used

__all__ = ["try_edited", "try_script"]
__getattr__ = when_used(__name__, {"search": "try_edited try_script"})
