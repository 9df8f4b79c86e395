"""Pieces that make deep-learning training fast on a GPU, and the lab that shows that they do.

Each room works without the others: `helpers.lab` measures, records and prints; the rooms named after a chapter hold
that chapter's library, and `helpers.chapters` what is measured of it. Importing any of them does no work.
"""

import warnings

if not __debug__:
    warnings.warn("python -O removes assert statements: what they would check passes unchecked", stacklevel=2)

__version__ = "0.4.0"
