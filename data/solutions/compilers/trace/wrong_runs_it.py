# The function itself.
# says: three calls on the captured path don't run the function
def trace(fn, example):
    return fn
