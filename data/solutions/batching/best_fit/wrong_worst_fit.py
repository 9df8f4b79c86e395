# The pack with the most room.
# says: as best fit packs them
def best_fit(lengths, capacity):
    packs, room = [], []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if room and max(room) >= lengths[i]:
            p = room.index(max(room))
        else:
            p = len(packs)
            packs.append([])
            room.append(capacity)
        packs[p].append(i)
        room[p] -= lengths[i]
    return packs
