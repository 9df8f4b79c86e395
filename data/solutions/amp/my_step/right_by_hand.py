import torch


def my_step(model, optimizer, scaler, micro_batches):
    params = list(model.parameters())
    sums = [torch.zeros_like(p) for p in params]
    for x, y in micro_batches:
        loss = scaler.scale(((model(x) - y) ** 2).mean())
        for total, g in zip(sums, torch.autograd.grad(loss, params)):
            total += g / len(micro_batches)
    for p, total in zip(params, sums):
        p.grad = total
    scaler.unscale_(optimizer)
    norm = torch.sqrt(sum((p.grad ** 2).sum() for p in params))
    for p in params:
        p.grad *= (1.0 / (norm + 1e-6)).clamp(max=1.0)
    scaler.step(optimizer)
    scaler.update()
