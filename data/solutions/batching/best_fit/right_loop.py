import numpy as np


def best_fit(lengths, capacity):
    packs, room = [], []
    for index in np.argsort(-np.asarray(lengths), kind="stable"):
        fitting = [place for place, free in enumerate(room) if free >= lengths[index]]
        if fitting:
            place = min(fitting, key=room.__getitem__)
        else:
            place = len(packs)
            packs.append([])
            room.append(capacity)
        packs[place].append(index)
        room[place] -= lengths[index]
    return packs
