import torch


def fused_with_norm(x, w, b, residual):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n = x.shape[0]
    for i in range(0, n, 100):
        t = torch.nn.functional.gelu(x[i:i + 100] * w + b) + residual[i:i + 100]
        var, mean = torch.var_mean(t, dim=-1, keepdim=True, unbiased=False)
        y[i:i + 100] = (t - mean) * torch.rsqrt(var + 1e-5)
    return y
