# The example's result, whatever the arguments.
# says: branch on data
def trace(fn, example):
    result = fn(*example)
    return lambda *arguments: result
