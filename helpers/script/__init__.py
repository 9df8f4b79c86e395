"""Somebody's training script in this process: started, hooked, seeded, its files redirected, ended.

running         started as `python SCRIPT` would, and told of each optimizer's step
hooks           the functions that are wrapped meanwhile, each listed once
recording       a run whose loop is observed and of which a few iterations are profiled
windows         which iterations these are
monitor         the thread that looks at the loop, and what it counts beside
observation     what was seen, as it is saved
run_facts       losses, and facts of a script that decide what applies to it
sandbox         files, seeds and ports of its own
"""
