# Three breaks make four graphs.
# says: Dynamo makes 3 graphs: 4
import torch


def three_graphs(x):
    for _ in range(1):
        x = x.sin()
    torch._dynamo.graph_break()
    x = x * 2
    torch._dynamo.graph_break()
    x = x.cos()
    torch._dynamo.graph_break()
    return x + 1
