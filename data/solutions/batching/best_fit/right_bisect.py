from bisect import bisect_left, insort


def best_fit(lengths, capacity):
    free = []  # (room, pack), sorted
    packs = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        need = int(lengths[i])
        at = bisect_left(free, (need, -1))
        if at == len(free):
            packs.append([i])
            insort(free, (capacity - need, len(packs) - 1))
        else:
            left, p = free.pop(at)
            packs[p].append(i)
            insort(free, (left - need, p))
    return packs
