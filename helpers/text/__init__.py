"""Text to train on: WikiText-103 where you have it, made-up text of the same shape where you don't.

    from helpers.text import corpus

    train = corpus("train", path="wikitext-103-raw")
    valid = corpus("validation", path="wikitext-103-raw", vocab=train.vocab)
    train.source                    # 'WikiText-103 raw, train split': belongs into the caption of every table
    train[0], train.lengths         # a sample as a 1-D array of token ids; how long each sample is

Needs numpy. Tokenising needs torchtext as well, and parquet files need pyarrow; each is loaded when it is first used.
"""

from .samples import Samples
from .synthetic import SyntheticText
from .vocab import TextError, Vocab, tokenize
from .wikitext import WikiText, corpus

__all__ = ["Samples", "SyntheticText", "TextError", "Vocab", "WikiText", "corpus", "tokenize"]
