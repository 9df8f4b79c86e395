# Padding's loss is zero, and its positions divide the sum.
# says: the mean over what isn't padding
import torch
import torch.nn.functional as F


class MyCrossEntropyLoss(torch.nn.Module):
    def __init__(self, pad_id=0):
        super().__init__()
        self.pad_id = pad_id

    def forward(self, logits, targets):
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return (losses * (targets != self.pad_id)).mean()
