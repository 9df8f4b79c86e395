# A percentage instead of a share.
# says: and 989 TFLOP/s: 49.87
from helpers.rush.rates import parameters


def my_mfu(model, sequence, tokens_per_s, peak):
    return 100 * (6 * parameters(model) + 12 * 16 * 2048 * sequence) * tokens_per_s / peak
