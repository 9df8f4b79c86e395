"""What a function's source tells of its lines: what repeats, what steps train on, what pads a batch."""

import functools

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from helpers.script.source_code import is_repeated, makes_for, padding_line, repeats
from helpers.script.tensors import batch_makers, padded_at

SELF_PLAY = """
def learn(net, judge):
    for generation in range(9):
        games = play(net)
        shuffled = shuffle(games)
        for game in shuffled:
            step(net, game)
        score = judge(net)
        print(score)
        for opponent in rivals:
            x = opponent.move(net)
            table.append(x)
        pairs = [match(net, rival) for rival in rivals]
"""
STEP = [6, 7]  # its lines that an ordinary iteration runs


@pytest.fixture
def file(tmp_path):
    def write(source):
        path = tmp_path / f"train{len(list(tmp_path.iterdir()))}.py"
        path.write_text(source)
        return str(path)

    return write


def function(source, file):
    """A function's code, as a script holds it."""
    variables = {}
    exec(compile(source, path := file(source), "exec"), variables)
    return next(each for name, each in variables.items() if getattr(each, "__code__", None) and path), path


def test_a_loop_of_its_own_repeats_a_line_and_the_trainings_doesnt(file):
    path = file(SELF_PLAY)
    assert is_repeated(path, 11, STEP) and not is_repeated(path, 8, STEP) and not is_repeated(path, 7, STEP)
    assert repeats(path, 13) and not repeats(path, 8)
    stream = file("def stream():\n    while True:\n        yield read()\n")
    assert not is_repeated(stream, 3, []), "a generator's loop goes on when it is asked"


def test_what_steps_train_on_is_told_from_what_is_only_reported(file):
    path = file(SELF_PLAY)
    assert makes_for(path, 4, STEP), "through what is made of it"
    assert not makes_for(path, 8, STEP) and not makes_for(path, 12, STEP)
    filled = file("for _ in range(9):\n    for _ in range(5):\n        memory.push(act())\n    step(memory.draw())\n")
    assert makes_for(filled, 3, [4])
    own = file("for _ in range(9):\n    for x in train:\n        y = x + 1\n        step(y)\n    y = check()\n")
    assert not makes_for(own, 5, [3, 4]), "the steps read their own"


def test_what_steps_train_on_is_found_in_the_methods_that_an_object_calls(file):
    methods = """
class Agent:
    def act(self):
        buffer = self.buffer
        for t in range(9):
            buffer.rewards[t] = self.env.step()

    def update(self):
        for batch in self.buffer.batches():
            self.log.append(self.step(batch))

    def report(self):
        self.log.append(judge(self))

    def learn(self):
        while self.goes_on():
            self.act()
            self.update()
            self.report()
"""
    path = file(methods)
    assert makes_for(path, 17, [18]) and not makes_for(path, 19, [18]), "a log that both fill is nobody's batch"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("longest = 512\n    return torch.stack([F.pad(row, (0, longest - len(row))) for row in rows])", 2),
        ("return tokenize(rows,\n        padding='max_length', max_length=128)", 2),
        ("ids = [r.ids for r in rows]\n    return [r + [0] * (LENGTH - len(r)) for r in ids]", 3),
        ("ids = [r.ids for r in rows]\n    return pad_sequence(ids, batch_first=True)", 3),
        ("top = 99\n    out = np.full((len(rows), top), 7)\n    return out", 2),
        ("return torch.stack(rows)", 0),
    ],
)
def test_the_line_that_sets_the_width_of_padded_rows_is_found(file, body, line):
    made, _ = function(f"def collate(rows):\n    {body}\n", file)
    assert padding_line(made.__code__) == line


def test_who_makes_a_batch_is_known_to_its_loader(file):
    collate, path = function("def collate(rows, width):\n    return rows.new_zeros(len(rows), width)\n", file)
    loader = DataLoader(range(4), collate_fn=functools.partial(collate, width=8))
    assert padded_at(batch_makers(loader), []) == (path, 2)

    class Sentences(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.zeros(512)

    at = padded_at(batch_makers(DataLoader(Subset(Sentences(), range(2)))), [])
    assert at == (__file__, Sentences.__getitem__.__code__.co_firstlineno + 1)
    before = file("empty = torch.zeros(3)\nencoded = tokenizer(texts, padding='max_length')\n")
    assert padded_at(batch_makers(DataLoader(range(4))), [path, before]) == (before, 2)
