"""What is given back between two configurations."""

import importlib

import torch

experiment = importlib.import_module("helpers.lab.experiment")  # the package has a function of that name


def test_the_next_configuration_starts_without_the_memory_that_cublas_worked_in(monkeypatch):
    done = []
    monkeypatch.setattr(experiment, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("workspaces"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("cache"))
    experiment.free_memory()
    assert done == ["workspaces", "cache"]  # in this order, or the cache would keep the workspaces


def test_a_torch_that_cannot_give_them_back_still_empties_its_cache(monkeypatch):
    done = []
    monkeypatch.setattr(experiment, "device", lambda: torch.device("cuda"))
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces", raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("cache"))
    experiment.free_memory()
    assert done == ["cache"]
