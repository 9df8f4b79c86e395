"""`Articles`: lines of text as bytes, with the last articles held out. A byte is a token, so nothing is tokenised."""

import re
from dataclasses import dataclass

import numpy as np

from .synthetic import SyntheticText
from .wikitext import find, local_wikitext, name_of, text_lines

HEADING = re.compile(r" = [^=].* = ?\n")  # of an article; those of its sections have more signs
SPLITS = ("validation", "test")
HELD_OUT = 0.1  # of the articles
GENERATED = 2_000  # lines, where there is no text


@dataclass(frozen=True)
class Articles:
    """Lines as bytes (n,) uint8, each between two line ends: those to train on, and those that are held out."""

    trained: list[np.ndarray]
    held_out: list[np.ndarray]
    source: str

    @classmethod
    def local(cls) -> "Articles":
        """WikiText's validation and test split where it is on this machine, 2.4 MB, their last tenth of articles held
        out; else generated text, of which each line is an article."""
        if (folder := local_wikitext()) is None:
            generated = SyntheticText(GENERATED)
            lines = [" ".join(generated.vocab.decode(sample)) for sample in generated]
            starts, source = list(range(len(lines))), generated.source
        else:
            paths = list(dict.fromkeys(path for split in SPLITS for path in find(folder, split)))
            lines = [line for line in text_lines(paths) if line.strip()]
            starts = [number for number, line in enumerate(lines) if HEADING.fullmatch(line)]
            source = "; ".join(map(name_of, paths))
        cut = starts[-max(round(len(starts) * HELD_OUT), 1)]
        samples = [np.frombuffer(f"\n{line.strip()}\n".encode(), np.uint8) for line in lines]
        return cls(samples[:cut], samples[cut:], source)
