"""Tables of which some are wrong, die or hang."""

import os
import time

from helpers.lab import Disagreement, experiment


@experiment(small=[{"size": 1}, {"size": 2}])
def right(size):
    return {"area": size}


@experiment(small=[{"size": 1}, {"size": 2}])
def differs(size):
    if size == 2:
        raise Disagreement("'fast' differs from 'plain'")
    return {"area": size}


@experiment(small=[{}])
def dies():
    os._exit(1)


@experiment(small=[{}])
def hangs():
    while True:
        time.sleep(60)
