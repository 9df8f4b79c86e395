import torch


class MyCrossEntropyLoss(torch.nn.Module):
    def __init__(self, pad_id=0):
        super().__init__()
        self.pad_id = pad_id

    def forward(self, logits, targets):
        logs = logits.float().log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
        real = (targets != self.pad_id).float()
        return -(logs * real).sum() / real.sum()
