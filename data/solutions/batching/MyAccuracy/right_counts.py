class MyAccuracy:
    def __init__(self, pad_id=0):
        self.pad_id = pad_id
        self.reset()

    def reset(self):
        self.right = self.count = 0

    def update(self, output, targets):
        guessed = output.argmax(-1) if output.dim() > targets.dim() else output
        real = targets != self.pad_id
        self.right = self.right + (guessed == targets)[real].sum()
        self.count = self.count + real.sum()

    def compute(self):
        return float(self.right / self.count)
