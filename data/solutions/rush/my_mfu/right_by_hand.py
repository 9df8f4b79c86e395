MODELS = {"llama-3.2-1b": dict(vocab=128256, d=2048, layers=16, heads=32, kv=8, ff=8192)}


def n_params(vocab, d, layers, heads, kv, ff):
    per_layer = d * d + 2 * d * (d // heads) * kv + d * d  # q, k, v, o
    per_layer += 3 * d * ff + 2 * d
    return vocab * d + layers * per_layer + d


def my_mfu(model, sequence, tokens_per_s, peak):
    m = MODELS[model]
    flops = 6 * n_params(**m) + 12 * m["layers"] * m["d"] * sequence
    return tokens_per_s * flops / peak
