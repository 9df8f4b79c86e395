"""The task's tokeniser: `basic_english` of torchtext."""

import functools
from collections.abc import Callable

from .files import TextError

NAME = "basic_english"


def tokenize(text: str) -> list[str]:
    """Lower-case words and punctuation marks: `"Don't!"` -> `["don", "'", "t", "!"]`.

    Drops double quotes, colons and semicolons. Costs about 0.7 s a million tokens; the first call loads torchtext.
    """
    return _tokenizer()(text)


@functools.cache
def _tokenizer() -> Callable[[str], list[str]]:
    try:
        from torchtext.data.utils import get_tokenizer
    except (ImportError, OSError) as error:  # OSError: versions with a compiled part that another torch built
        reason = str(error).splitlines()[0]
        raise TextError(f"tokenising needs torchtext: pip install torchtext==0.6.0 ({reason})") from error
    return get_tokenizer(NAME)
