# Padding counts as a wrong answer.
# says: the accuracy of one batch
class MyAccuracy:
    def __init__(self, pad_id=0):
        self.pad_id = pad_id
        self.reset()

    def reset(self):
        self.right = self.count = 0

    def update(self, output, targets):
        guessed = output.argmax(-1) if output.dim() > targets.dim() else output
        self.right += int(((guessed == targets) & (targets != self.pad_id)).sum())
        self.count += targets.numel()

    def compute(self):
        return self.right / self.count
