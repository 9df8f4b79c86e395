"""Programs that trials run, each a function that returns a step. They need nothing but Python's library."""

import os
import subprocess
import sys
import time


def sleep(ms):
    return lambda: time.sleep(ms / 1e3)


def die(after):
    left = iter(range(after))

    def step():
        if next(left, None) is None:
            sys.exit("no more steps")

    return step


def kill(after):
    left = iter(range(after))

    def step():
        if next(left, None) is None:
            os.kill(os.getpid(), 9)

    return step


def prefetch(ms):
    """A step that waits for an item that another process makes, in a session of its own and never idle."""
    code = f"import time\nwhile True: time.sleep({ms / 1e3}); print(1, flush=True)"
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    return lambda: worker.stdout.readline()
