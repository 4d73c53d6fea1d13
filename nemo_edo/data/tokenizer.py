"""The tokenizer of a model's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_edo.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Decoder:
    """Makes a response's text, without special tokens and without the token that ended it."""

    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    left_out: frozenset[int] | None = None
    """The special tokens that are left out; None: all."""

    def __call__(self, ids: Sequence[int]) -> str:
        ids = ids[:-1] if ids and ids[-1] in self.ends else ids
        if self.left_out is None:
            return self.tokenizer.decode(ids, skip_special_tokens=True)
        return self.tokenizer.decode([one for one in ids if one not in self.left_out], skip_special_tokens=False)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """No code that comes with the folder is run. Raises UserError where the tokenizer cannot be loaded."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer of transformers 5 takes the class of the model's type, which replaces the file's own way of cutting
    # words: other token ids for a Qwen2 model with another tokenizer. The file says all of it.
    loader = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    try:
        return loader.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers (Rust) raises a bare Exception for a damaged file
        raise _unusable(folder, error) from error


def check_tokenizer_file(folder: Path) -> None:
    """Raises UserError as ``load_tokenizer`` does, as far as ``tokenizer.json`` tells it: it takes a part of a second,
    as ``transformers`` is not imported."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # see above
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: Exception) -> UserError:
    why = str(error).strip().partition("\n")[0]  # transformers lists what it has looked for
    return UserError(f"the tokenizer of {folder} cannot be loaded ({why}); copy the model's own there")
