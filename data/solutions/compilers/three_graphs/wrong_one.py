# A branch on a shape is a guard, no break.
# says: Dynamo makes 3 graphs: 1
def three_graphs(x):
    if x.shape[0] < 3:
        x = x + 1
    if x.is_floating_point():
        x = x * 2
    return x
