"""Loops in plain Python, for any interpreter or compiler; only the standard library is used.

    pypy3 jit_loops.py run NAME SECONDS < input.json        calls a loop again and again: times and result, as JSON
    python3 jit_loops.py demo 5                             the lecture's demo, 10⁵ turns; prints its loop's seconds

`strings` is the lecture's: `add` gets strings or numbers. `integers` is the same without strings. The other two are
loops from training; `packing` is inherently sequential.
"""


def add(x, y):
    return x + y


def strings(numbers):
    count = 0
    text = ""
    for number in numbers:
        if number > 0.5:
            text += add("a", "b")
        else:
            count += add(1, 1)
    return count, text


def integers(numbers):
    large = 0
    small = 0
    for number in numbers:
        if number > 0.5:
            large += add(2, 1)
        else:
            small += add(1, 1)
    return small, large


def forgetting(right):
    """Number of times that a sample was right and an epoch later wrong; input (epochs, samples), right or not."""
    events = 0
    for epoch in range(1, len(right)):
        before = right[epoch - 1]
        now = right[epoch]
        for sample in range(len(now)):
            if before[sample] and not now[sample]:
                events += 1
    return events


def packing(lengths):
    """Documents are packed in order into windows of 2,048 tokens; returns the windows and the empty tokens."""
    windows = 1
    left = 2048
    empty = 0
    for length in lengths:
        if length > left:
            empty += left
            windows += 1
            left = 2048
        left -= length
    return windows, empty + left


LOOPS = {"strings": strings, "integers": integers, "forgetting": forgetting, "packing": packing}


def run(name, given, seconds, least=20, most=1000):
    """Milliseconds of each call, including the first, and the result."""
    import time

    loop, taken, result = LOOPS[name], [], None
    stop = time.perf_counter() + seconds
    while len(taken) <= least or (time.perf_counter() < stop and len(taken) < most):
        began = time.perf_counter()
        result = loop(given)
        taken.append((time.perf_counter() - began) * 1e3)
    return {"ms": taken, "result": result}


def demo(exponent):
    """Seconds of the lecture's loop, which draws its numbers itself; without imports and process start."""
    import random
    import time

    began = time.perf_counter()
    count, text = 0, ""
    for _ in range(10**exponent):
        if random.random() > 0.5:
            text += add("a", "b")
        else:
            count += add(1, 1)
    return time.perf_counter() - began


def main(arguments):
    if arguments[0] == "demo":
        print(demo(int(arguments[1])))
        return
    import json
    import sys

    _, name, seconds = arguments
    json.dump(run(name, json.load(sys.stdin), float(seconds)), sys.stdout)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
