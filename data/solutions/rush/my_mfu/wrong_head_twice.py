# The embedding counts twice, though it is the head, too.
# says: and 989 TFLOP/s: 0.5943
from helpers.rush.rates import parameters


def my_mfu(model, sequence, tokens_per_s, peak):
    n = parameters(model) + 128256 * 2048
    return (6 * n + 12 * 16 * 2048 * sequence) * tokens_per_s / peak
