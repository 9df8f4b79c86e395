"""Speed as a test: what a training step does is counted, written down once, and may not become more.

plugin      the pytest fixture `speed_guard`, which imports nothing before it is used
blocks      a test's block, or a script's iterations, of which some are counted
counting    operators, waits, copies, bytes, FLOPs, compilations and calls of Python
places      the line of the user's code that has something done
record      `speed_guard.json`, and what is more than it says
"""
