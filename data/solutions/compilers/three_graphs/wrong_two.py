# One break makes two graphs.
# says: Dynamo makes 3 graphs: 2
def three_graphs(x):
    y = x.sin()
    print("half way")
    return y * 2
