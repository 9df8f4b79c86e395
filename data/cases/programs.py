"""Programs that trials run, each a function that returns a step. They need nothing but Python's library."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path


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


def unmarked(folder):
    """A step of a process that lost its environment, as one does that sets its title, beside a worker without any."""
    worker = subprocess.Popen(["sleep", "1000"], env={})
    begin, end = map(int, Path("/proc/self/stat").read_text().split()[49:51])
    ctypes.memset(begin, 0, end - begin)
    for pid in (os.getpid(), worker.pid):
        Path(folder, str(pid)).touch()
    return lambda: time.sleep(0.005)
