# The norm is that of the scaled gradients.
# says: a step on 4 micro-batches is the clipped step on all of their samples
import torch
import torch.nn.functional as F


def my_step(model, optimizer, scaler, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        scaler.scale(F.mse_loss(model(inputs), targets) / len(micro_batches)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
