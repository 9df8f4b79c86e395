"""Tables of which some are wrong, die or hang."""

import os
import time

from helpers.lab import Disagreement
from helpers.book.table import table


@table(small=[{"size": 1}, {"size": 2}])
def right(size):
    return {"area": size}


@table(small=[{"size": 1}, {"size": 2}])
def differs(size):
    if size == 2:
        raise Disagreement("'fast' differs from 'plain'")
    return {"area": size}


@table(small=[{}])
def dies():
    os._exit(1)


@table(small=[{}])
def hangs():
    while True:
        time.sleep(60)
