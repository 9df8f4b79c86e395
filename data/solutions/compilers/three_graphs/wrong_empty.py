# After the last break nothing is computed, so there is no graph.
# says: Dynamo makes 3 graphs: 2
import torch


def three_graphs(x):
    x = x.sin()
    torch._dynamo.graph_break()
    x = x * 2
    torch._dynamo.graph_break()
    return x
