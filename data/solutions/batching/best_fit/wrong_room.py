# The room of a new pack is not reduced by its first document.
# says: no pack overflows:
def best_fit(lengths, capacity):
    packs, room = [], []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [p for p in range(len(room)) if room[p] >= lengths[i]]
        if fitting:
            p = min(fitting, key=lambda p: room[p])
            packs[p].append(i)
            room[p] -= lengths[i]
        else:
            packs.append([i])
            room.append(capacity)
    return packs
