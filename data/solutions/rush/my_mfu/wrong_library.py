# The library counts the operations.
# says: helpers.rush.rates.flops_per_token is what this exercise asks for
from helpers.rush.rates import flops_per_token


def my_mfu(model, sequence, tokens_per_s, peak):
    return flops_per_token(model, sequence) * tokens_per_s / peak
