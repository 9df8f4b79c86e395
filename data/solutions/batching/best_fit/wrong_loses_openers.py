# The document that opens a pack isn't put into it.
# says: every sample is packed once:
def best_fit(lengths, capacity):
    packs, room = [], []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [p for p in range(len(room)) if room[p] >= lengths[i]]
        if not fitting:
            packs.append([])
            room.append(capacity - lengths[i])
            continue
        p = min(fitting, key=lambda p: room[p])
        packs[p].append(i)
        room[p] -= lengths[i]
    return packs
