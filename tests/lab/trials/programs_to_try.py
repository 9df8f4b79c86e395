"""Programs that trials run, each a function that returns a step. They need nothing but Python's library."""

import os
import subprocess
import sys
import threading
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


def allocate(mib):
    block = bytearray(mib << 20)
    block[::4096] = b"1" * len(block[::4096])
    keep = threading.local()
    keep.block = block
    return lambda: time.sleep(0.001 + 0 * len(keep.block))
