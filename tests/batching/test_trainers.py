"""Lightning, accelerate and transformers train on our batches: new ones each epoch, and each sample on one rank."""

import json
import operator
import pickle
import socket

import pytest
import torch
from cases.trainers import EPOCHS, LENGTHS, RUNS, loader, on_a_rank
from torch.utils.data import DataLoader

from helpers.batching import BalancedBatchSampler, SequencedDataset
from helpers.lab.machine import installed

NEEDS = {"lightning": ["lightning"], "accelerate": ["accelerate"], "transformers": ["transformers", "accelerate"]}


@pytest.fixture
def group(monkeypatch):
    """A process group of three ranks, of which this is the last, once it is called."""

    def start():
        for name, answer in {"is_initialized": True, "get_world_size": 3, "get_rank": 2}.items():
            monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer)

    yield start
    monkeypatch.undo()


@pytest.mark.parametrize("place", ["batch_sampler", "batch_sampler.sampler", "batch_sampler.batch_sampler"])
def test_the_epoch_is_set_wherever_trainers_look(place):
    sampler = BalancedBatchSampler([3, 1, 2], 2, 5)
    operator.attrgetter(place)(DataLoader([0, 1, 2], batch_sampler=sampler)).set_epoch(4)
    assert sampler.epoch == 4


def test_ranks_of_a_group_that_starts_later_count_and_reach_spawned_workers(group, monkeypatch):
    sampler, dataset = BalancedBatchSampler(LENGTHS, 8, 20), SequencedDataset([[1] * n for n in LENGTHS], None, 90)
    group()
    copies = [pickle.loads(pickle.dumps(item)) for item in (sampler, dataset)]
    expected = list(BalancedBatchSampler(LENGTHS, 8, 20, rank=2, world_size=3))
    assert list(sampler) == expected
    total = len(dataset)
    monkeypatch.undo()
    assert list(copies[0]) == expected
    assert len(copies[1]) == total < len(dataset)


def test_what_would_share_the_batches_once_more_is_refused(group):
    sampler = BalancedBatchSampler(LENGTHS, 8, 20)
    assert not hasattr(sampler, "drop_last")
    group()
    with pytest.raises(ValueError, match=r"each of the 3 ranks .* use_distributed_sampler=False; .* accelerate"):
        getattr(sampler, "drop_last", False)


def each_once(batches):
    return sorted(sample for batch in batches for sample in batch) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("name", RUNS)
def test_a_trainer_gets_new_batches_in_each_epoch(name):
    for library in NEEDS[name.split(",")[0]]:
        pytest.importorskip(library)
    run, options = RUNS[name]
    epochs = run(loader(), **options)
    assert len({json.dumps(epoch) for epoch in epochs}) == EPOCHS
    assert all(map(each_once, epochs))


@pytest.mark.skipif(not all(map(installed, ("lightning", "accelerate", "transformers"))), reason="needs all three")
def test_two_ranks_share_an_epoch_or_an_error_names_the_flag(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(on_a_rank, (2, str(tmp_path), port), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for name in ("lightning", "accelerate", "transformers, prepared"):
        assert "use_distributed_sampler=False" in first[name] == second[name]
    for name in ("lightning, with its flag", "transformers"):
        assert all(each_once(mine + others) for mine, others in zip(first[name], second[name], strict=True))
        assert len({json.dumps(epoch) for epoch in first[name]}) == EPOCHS
