# 2 operations a parameter are those of forward alone.
# says: and 989 TFLOP/s: 0.1988
from helpers.rush.rates import parameters


def my_mfu(model, sequence, tokens_per_s, peak):
    return (2 * parameters(model) + 12 * 16 * 2048 * sequence) * tokens_per_s / peak
