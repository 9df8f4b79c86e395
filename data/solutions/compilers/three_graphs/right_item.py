def three_graphs(x):
    largest = (x * x).max().item()
    y = x / largest
    print("scaled by", largest)
    return y + 1
