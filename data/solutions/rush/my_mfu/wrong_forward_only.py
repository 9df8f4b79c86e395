# 2 operations a parameter are those of forward alone.
# says: 0.1988 instead of 0.4987
from helpers.rush.rates import parameters


def my_mfu(model, sequence, tokens_per_s, peak):
    return (2 * parameters(model) + 12 * 16 * 2048 * sequence) * tokens_per_s / peak
