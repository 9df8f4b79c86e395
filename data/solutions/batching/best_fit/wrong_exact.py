# A document that fills a pack exactly doesn't count as fitting.
# says: as best fit packs them
def best_fit(lengths, capacity):
    packs, room = [], []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [p for p in range(len(room)) if room[p] > lengths[i]]
        if not fitting:
            packs.append([])
            room.append(capacity)
            fitting = [len(packs) - 1]
        p = min(fitting, key=lambda p: room[p])
        packs[p].append(i)
        room[p] -= lengths[i]
    return packs
