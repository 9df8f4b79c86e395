# The windows are used up: a second epoch is empty.
# says: and once in a second epoch, in another order
import random


class BalancedSampler:
    def __init__(self, lengths, batch_size, k):
        self.size, self.windows = batch_size, {}
        for index in random.sample(range(len(lengths)), len(lengths)):
            self.windows.setdefault(int(lengths[index]) // (k + 1), []).append(index)

    def __iter__(self):
        while left := list(self.windows):
            window = self.windows[random.choice(left)]
            yield [window.pop() for _ in range(min(self.size, len(window)))]
            self.windows = {name: window for name, window in self.windows.items() if window}
