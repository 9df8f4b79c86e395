# The function itself: right, but nothing is captured.
# says: three calls on the captured path don't run the function: 3 runs, at most 0
def guarded_trace(fn, example):
    return lambda *arguments: fn(*arguments)
