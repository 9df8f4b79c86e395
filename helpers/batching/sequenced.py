"""Batches as one long sequence each: documents one after another, and no padding.

    dataset = SequencedDataset(corpus, batch_size=None, max_length=2048, strategy="best-fit", fixed=True)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, pin_memory=True, persistent_workers=True)
    for epoch in range(epochs):
        dataset.set_epoch(epoch)
        for packed in loader:
            logits = model(packed.tokens[None], positions=packed.positions)
            loss = criterion(logits, packed.targets()[None])

`batch_size=None` in the loader says that what the dataset yields is a batch already.

The whole epoch is planned before its first sequence, by every worker for itself, from the samples' lengths alone: 0.2 s
and 32 MB for a million samples. Of that plan each rank takes every `world_size`-th sequence, and each of its
workers every `num_workers`-th of these. So nothing has to be agreed on between processes, the loader gives the same
sequences in the same order however many workers it has, and the number of sequences is known in advance.
"""

import operator
from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import IterableDataset

from ..lab.arguments import check_at_least, check_choice
from ..lab.ranks import Place, worker_of
from .datasets import Sample, lengths_of, token_ids
from .packed import Packed, join
from .packing import STRATEGIES, Plan, plan_packs, plan_stream, split_evenly

LAST = ("carry", "crop", "drop")


class SequencedDataset(IterableDataset[Packed]):
    """Sequences of at most `max_length` tokens, made of whole samples in random order.

    A sequence closes when it holds `batch_size` samples (None: however many), or when the next sample doesn't fit, and
    `last` says what becomes of that one:

        carry   it begins the next sequence; nothing is lost
        crop    it is cut to the room that is left, and its rest is lost; samples longer than `max_length` are cut too
        drop    it is lost

    If no room is left at all, nothing is cropped or dropped: the sample begins the next sequence.

    With a `strategy` of `pack`, the whole epoch is packed by it, the packs come in random order, and nothing is lost.
    "greedy" takes the samples shuffled, as no strategy does. With the others, only equally long samples change places
    from epoch to epoch, and a sequence holds samples of like length, the longest first: random is only which of them.

    An epoch is the same for the same seed. It doesn't advance by itself: call `set_epoch` before each pass. That
    reaches workers that live on from epoch to epoch, too. Lightning sets the epoch of samplers only, so there it is:

        def on_train_epoch_start(self):  # of the LightningModule
            self.trainer.train_dataloader.dataset.set_epoch(self.current_epoch)

    On one process accelerate calls it. On several, take the DataLoader without `accelerator.prepare`, which would share
    the sequences between ranks once more, and fails.

    Each sample comes once over all ranks (torch.distributed's unless given), and ranks get equally many sequences: up
    to `world_size` − 1 of those with the most documents are split in two. Only if each sequence is a single document
    may ranks differ by one.

    `fixed=True` pads to `max_length`, so that the tensors of a token each keep their shapes and compiled code is
    compiled once; `offsets` still has one entry a document.

    Samples are a corpus of `helpers.text`, or anything with a length whose elements are token ids. Unless it has
    `lengths`, each sample is looked at once when the dataset is made.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        batch_size: int | None,
        max_length: int,
        *,
        last: str = "carry",
        strategy: str | None = None,
        seed: int = 0,
        pad_id: int = 0,
        fixed: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        check_at_least(1, max_length=max_length, batch_size=1 if batch_size is None else batch_size)
        check_at_least(0, seed=seed)
        self.samples, self.pad_id, self.fixed = samples, pad_id, fixed
        self.batch_size, self.max_length, self.seed = batch_size, operator.index(max_length), seed
        self.last, self.strategy = last, strategy
        self._check_choices()
        self.lengths = lengths_of(samples)
        self._check_samples()
        self._place = Place(rank, world_size)
        self._planned: tuple[tuple[int, int], Plan] | None = None

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the passes that begin from now on."""
        self._place.set_epoch(epoch)

    def __len__(self) -> int:
        """This rank's sequences in the epoch. Epochs differ a little, so ask anew in each, as progress bars do:
        a `DataLoader` warns when there are more than before."""
        return self._count(self._place.epoch)

    def _count(self, epoch: int) -> int:
        rank, ranks = self._place.ranks
        return len(range(rank, len(self._plan(epoch)), ranks))

    def __iter__(self) -> Iterator[Packed]:
        # The epoch now: a worker may get to its first sequence much later.
        return self._sequences(self._place.epoch, *worker_of())

    def _sequences(self, epoch: int, begin: int, step: int) -> Iterator[Packed]:
        plan, total = self._plan(epoch), self._count(epoch)
        rank, ranks = self._place.ranks
        for number in range(begin, total, step):  # of this rank's
            index = rank + ranks * number
            documents = slice(plan.begins[index], plan.ends[index])
            yield self._sequence(plan.order[documents], plan.sizes[documents])

    def _sequence(self, indices: np.ndarray, sizes: np.ndarray) -> Packed:
        """The first `sizes` tokens of these samples, joined."""
        parts = [np.empty(0, np.int64)]
        for index, size in zip(indices.tolist(), sizes.tolist(), strict=True):
            part = token_ids(self.samples[index], f"sample {index}")
            if len(part) != self.lengths[index]:
                raise ValueError(f"sample {index} has {len(part)} tokens, and had {self.lengths[index]} at first")
            parts.append(part[:size].astype(np.int64, copy=False))
        length = self.max_length if self.fixed else None
        return join(np.concatenate(parts), sizes, length=length, pad_id=self.pad_id)

    def _plan(self, epoch: int) -> Plan:
        """The epoch's plan over all ranks; the last one is kept."""
        ranks = self._place.ranks[1]
        if self._planned is None or self._planned[0] != (epoch, ranks):
            random = np.random.default_rng((self.seed, epoch))
            order = random.permutation(len(self.lengths))
            if self.strategy is None:
                plan = plan_stream(order, self.lengths, self.max_length, self.batch_size, self.last)
            else:
                plan = plan_packs(order, self.lengths, self.max_length, self.strategy, random)
            plan = split_evenly(plan, ranks)
            if len(plan) < ranks:
                raise ValueError(f"world_size is {ranks}; there are only {len(plan)} sequences to share")
            self._planned = (epoch, ranks), plan
        return self._planned[1]

    def _check_choices(self) -> None:
        check_choice(LAST, last=self.last)
        if self.strategy is None:
            return
        check_choice(STRATEGIES, strategy=self.strategy)
        if self.batch_size is not None:
            raise ValueError(
                f"batch_size is {self.batch_size}; it must be None with strategy={self.strategy!r}, "
                "which puts as many samples together as fit"
            )
        if self.last != "carry":
            raise ValueError(f"last is {self.last!r}; it must be 'carry' with a strategy, which loses nothing")

    def _check_samples(self) -> None:
        if not len(self.lengths):
            raise ValueError("there are no samples; the dataset must hold at least one")
        if self.last != "crop" and self.lengths.max() > self.max_length:
            longest = int(self.lengths.argmax())
            raise ValueError(
                f"sample {longest} has {self.lengths[longest]} tokens and max_length is {self.max_length}; "
                "cut the samples (StandardDataset does), raise max_length, or choose last='crop'"
            )
