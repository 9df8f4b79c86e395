"""Pieces that make deep-learning training fast on a GPU, and the lab that shows that they do.

Each room works without the others: `helpers.lab` measures, records and prints; the rooms named after a chapter hold
that chapter's library, and `helpers.chapters` what is measured of it. Importing any of them does no work.

    with helpers.watch():      # around a loop, in a notebook too: what `dlspeed profile` tells of a script
        train(model, loader)
"""

import warnings

from .boot import when_used

if not __debug__:
    warnings.warn("python -O removes assert statements: what they would check passes unchecked", stacklevel=2)

__version__ = "0.4.0"

__getattr__ = when_used(__name__, {"findings.watch": "watch"})
