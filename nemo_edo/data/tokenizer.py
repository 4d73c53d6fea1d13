"""The tokenizer of a model's folder, and the tokens that end a response, which three files may name differently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_edo.errors import UserError
from nemo_edo.utils.files import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "eos_token_id"
SETTING = "sampling.stop_token_ids"


@dataclass(frozen=True)
class Decoder:
    """Makes a response's text, without special tokens and without the token that ended it."""

    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    left_out: frozenset[int] | None = None  # the special tokens that are left out; None: all

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
    """Raises UserError as ``load_tokenizer`` does, by ``tokenizer.json`` alone: ``transformers`` is not imported."""
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


@dataclass(frozen=True)
class StopTokens:
    """The union of what every source names."""

    named_by: Mapping[str, tuple[int, ...]]  # the ids that a source names; sources that name none are left out
    texts: Mapping[int, str]  # each token as the vocabulary writes it

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(sorted(self.texts))

    def lines(self) -> list[str]:
        """What a person should know of them: all of them, and a disagreement between the files."""
        tokens = ", ".join(f"{token} {text!r}" for token, text in sorted(self.texts.items()))
        said = [f"a response ends with {'any of ' if len(self.texts) > 1 else ''}{tokens}"]
        files = {source: ids for source, ids in self.named_by.items() if source != SETTING}
        if any(not set(one) & set(other) for one in files.values() for other in files.values()):
            each = "; ".join(f"{source} has {', '.join(map(str, ids))}" for source, ids in files.items())
            said.append(
                f"warning: the model's files disagree about the end token ({each}); all of them end a response here. "
                "If one is wrong, correct that file"
            )
        return said


def read_stop_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase, more: Iterable[int] = ()) -> StopTokens:
    """The end tokens of the tokenizer, generation_config.json, config.json and ``more`` (``sampling.stop_token_ids``).
    Raises UserError where no source names one, and, naming the source, for an id that is not in the vocabulary."""
    named = {"the tokenizer": tokenizer.eos_token_id}
    size = len(tokenizer)
    for name in ("generation_config.json", "config.json"):
        fields = read_object(folder / name, ()) if (folder / name).is_file() else {}
        named[name] = fields.get(KEY)
        model_size = fields.get("vocab_size") if name == "config.json" else None
        size = max(size, model_size if isinstance(model_size, int) else 0)  # the model's may be larger
    named[SETTING] = list(more)
    named_by = {}
    for source, value in named.items():
        ids = value if isinstance(value, list) else [] if value is None else [value]
        where = source if source in (SETTING, "the tokenizer") else f"{folder / source}: {KEY}"
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise UserError(f"{where} is {value!r}, expected a token id or a list of token ids")
        for token in ids:
            if not 0 <= token < size:
                raise UserError(f"{where} names the end token {token}; the model's vocabulary has 0 to {size - 1}")
        if ids:
            named_by[source] = tuple(ids)
    if not named_by:
        raise UserError(
            f"nothing in {folder} names an end token, so responses could not end: set eos_token in "
            f"tokenizer_config.json, {KEY} in generation_config.json, or {SETTING}"
        )
    found = sorted({token for ids in named_by.values() for token in ids})
    return StopTokens(
        named_by, {token: tokenizer.convert_ids_to_tokens(token) or "(not in the tokenizer)" for token in found}
    )
