# The logarithm of a softmax that has rounded to zero.
# says: logits 100 times as large
import torch


class MyCrossEntropyLoss(torch.nn.Module):
    def __init__(self, pad_id=0):
        super().__init__()
        self.pad_id = pad_id

    def forward(self, logits, targets):
        real = targets != self.pad_id
        return -torch.softmax(logits, -1).gather(-1, targets[..., None]).squeeze(-1)[real].log().mean()
