# A percentage instead of a share.
# says: 49.87 instead of 0.4987
from helpers.rush.rates import flops_per_token


def my_mfu(model, sequence, tokens_per_s, peak):
    return 100 * flops_per_token(model, sequence) * tokens_per_s / peak
