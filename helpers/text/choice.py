"""The text that there is: a local one, the hub's, or a made-up one."""

from pathlib import Path

from .files import TextError
from .samples import Samples
from .synthetic import SIZE, SyntheticText
from .vocab import Vocab
from .wikitext import WikiText, check_split

SEEDS = {"train": 0, "validation": 1, "test": 2}


def corpus(
    split: str = "train",
    path: Path | str | None = None,
    *,
    vocab: Vocab | None = None,
    download: bool = False,
    cache: Path | str | bool | None = None,
    max_samples: int | None = None,
    synthetic_samples: int = 10_000,
) -> Samples:
    """WikiText from `path`; else from the hub if `download` allows it; else `SyntheticText`. Its `source` says which.

    Splits of synthetic text are texts of their own, seeds 0, 1 and 2, in one language. A cached download is used only
    with `download=True`, so that the same call gives the same text on every machine.
    """
    check_split(split)
    if path is not None or download:
        return WikiText(split, path, vocab=vocab, download=download, cache=cache, max_samples=max_samples)
    samples = synthetic_samples if max_samples is None else min(max_samples, synthetic_samples)
    made = SyntheticText(samples, SEEDS[split], SIZE if vocab is None else len(vocab))
    if vocab is not None and vocab != made.vocab:
        raise TextError("the vocabulary given is not that of synthetic text; give path= or download=True, as for it")
    return made
