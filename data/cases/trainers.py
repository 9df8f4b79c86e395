"""Other libraries' training loops over our batches: importable by name, as each rank is a new process.

Each loop takes a DataLoader and gives, for each epoch, the samples of each batch that this rank was given.
"""

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from helpers.batching import BalancedBatchSampler, StandardDataset

EPOCHS = 3
LENGTHS = np.random.default_rng(0).integers(1, 60, 90)


def loader():
    dataset = StandardDataset([[index] * length for index, length in enumerate(LENGTHS)])
    sampler = BalancedBatchSampler(dataset.lengths, batch_size=4, k=20)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=first_tokens)


def first_tokens(samples):
    return {"samples": torch.stack([sample[0] for sample in samples])}


class Model(torch.nn.Module):
    """It remembers which samples it was given."""

    def __init__(self):
        super().__init__()
        self.weight, self.batches = torch.nn.Parameter(torch.zeros(1)), []

    def forward(self, samples):
        self.batches.append(samples.tolist())
        return {"loss": (self.weight * samples).sum()}

    def by_epoch(self):
        steps = len(self.batches) // EPOCHS
        return [self.batches[begin : begin + steps] for begin in range(0, len(self.batches), steps)]


def lightning(batches, ranks=1, **options):
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch):
            return self.model(**batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    options |= dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    Trainer(accelerator="cpu", devices=ranks, max_epochs=EPOCHS, **options).fit(module, batches)
    return module.model.by_epoch()


def accelerate(batches):
    from accelerate import Accelerator

    prepared = Accelerator(cpu=True).prepare(batches)
    return [[batch["samples"].tolist() for batch in prepared] for _ in range(EPOCHS)]


def transformers(batches, prepare=False):
    from transformers import Trainer, TrainingArguments

    class Own(Trainer):
        def get_train_dataloader(self):
            return self.accelerator.prepare(batches) if prepare else batches

    model = Model()
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as folder:
        Own(model, TrainingArguments(folder, num_train_epochs=EPOCHS, use_cpu=True, **quiet)).train()
    return model.by_epoch()


RUNS = {
    "lightning": (lightning, {}),
    "lightning, with its flag": (lightning, {"use_distributed_sampler": False}),
    "accelerate": (accelerate, {}),
    "transformers": (transformers, {}),
    "transformers, prepared": (transformers, {"prepare": True}),
}


def on_a_rank(rank, ranks, folder, port):
    """Each library's loop, one after another; what it gave, or its error, in a file."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    outcomes = {}
    for name, (run, options) in RUNS.items():
        batches = loader()  # before Lightning starts the process group
        try:
            outcomes[name] = run(batches, **options, **({"ranks": ranks} if run is lightning else {}))
        except (TypeError, ValueError) as error:
            outcomes[name] = str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))
