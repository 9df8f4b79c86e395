import torch


class MyScores:
    def __init__(self, classes):
        self.classes = classes
        self.confusion = torch.zeros(classes, classes, dtype=torch.long)

    def update(self, logits, labels):
        places = labels * self.classes + logits.argmax(1)
        self.confusion += torch.bincount(places, minlength=self.classes**2).view(self.classes, -1)

    def compute(self):
        return 2 * self.confusion.diag() / (self.confusion.sum(0) + self.confusion.sum(1))
