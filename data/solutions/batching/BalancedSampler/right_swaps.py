import random


class BalancedSampler:
    def __init__(self, lengths, batch_size, k):
        self.size, self.windows = batch_size, {}
        for index, length in enumerate(lengths):
            self.windows.setdefault(int(length) // (k + 1), []).append(index)

    def __iter__(self):
        left = {name: len(window) for name, window in self.windows.items()}
        while left:
            name = random.choice(list(left))
            window, batch = self.windows[name], []
            while left[name] and len(batch) < self.size:
                at, last = random.randrange(left[name]), left[name] - 1
                window[at], window[last] = window[last], window[at]
                batch.append(window[last])
                left[name] = last
            yield batch
            if not left[name]:
                del left[name]
