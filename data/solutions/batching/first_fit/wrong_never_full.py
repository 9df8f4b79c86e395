# A document that fills a pack exactly opens another one.
# says: 6, 4, 7 and 3 fill two packs of 10: 3
import numpy as np


def first_fit(lengths, capacity):
    packs, room = [], []
    for index in np.argsort(-np.asarray(lengths), kind="stable"):
        place = next((place for place, free in enumerate(room) if free > lengths[index]), len(packs))
        if place == len(packs):
            packs.append([])
            room.append(capacity)
        packs[place].append(index)
        room[place] -= lengths[index]
    return packs
