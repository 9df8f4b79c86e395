# First fit in the order given, and not the longest first.
# says: the longest come first, in whatever order they are given
def first_fit(lengths, capacity):
    packs, room = [], []
    for index, length in enumerate(lengths):
        place = next((place for place, free in enumerate(room) if free >= length), len(packs))
        if place == len(packs):
            packs.append([])
            room.append(capacity)
        packs[place].append(index)
        room[place] -= length
    return packs
