"""Text to train on: WikiText-103, or generated text of the same shape without it.

    from helpers.text import SyntheticText, WikiText

    train = WikiText("train", "wikitext-103-raw")      # or, without it, SyntheticText(10_000, seed=0)
    valid = WikiText("validation", "wikitext-103-raw", vocab=train.vocab)
    train.source                    # 'WikiText-103 raw, train split', for captions
    train[0], train.lengths         # a sample's token ids (T,); the lengths (n,)

Tokenising needs torchtext, and parquet files need pyarrow; each is imported on first use.
"""

from .samples import Samples
from .synthetic import SyntheticText
from .vocab import TextError, Vocab, tokenize
from .wikitext import WikiText, local_wikitext

__all__ = ["Samples", "SyntheticText", "TextError", "Vocab", "WikiText", "local_wikitext", "tokenize"]
