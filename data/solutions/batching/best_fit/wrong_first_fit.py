# The first pack with room, not the fullest.
# says: as best fit packs them
def best_fit(lengths, capacity):
    packs, room = [], []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for p, free in enumerate(room):
            if free >= lengths[i]:
                break
        else:
            p = len(packs)
            packs.append([])
            room.append(capacity)
        packs[p].append(i)
        room[p] -= lengths[i]
    return packs
