# The batches' accuracies are averaged.
# says: the accuracy of five
class MyAccuracy:
    def __init__(self, pad_id=0):
        self.pad_id, self.all = pad_id, []

    def reset(self):
        self.all = []

    def update(self, output, targets):
        guessed = output.argmax(-1) if output.dim() > targets.dim() else output
        real = targets != self.pad_id
        self.all.append(float((guessed == targets)[real].float().mean()))

    def compute(self):
        return sum(self.all) / len(self.all)
