import torch


def three_graphs(x):
    x = x.sin()
    torch._dynamo.graph_break()
    x = x * 2
    torch._dynamo.graph_break()
    return x.cos()
