from helpers.models.llama import preset
from helpers.rush.rates import parameters


def operations(size, n, sequence):
    attention = 2 * (2 * size["width"] * sequence)  # scores and their product with the values
    return 3 * (2 * n + size["layers"] * attention)  # forward, and twice that backward


def my_mfu(model, sequence, tokens_per_s, peak):
    return operations(preset(model), parameters(model), sequence) / peak * tokens_per_s
