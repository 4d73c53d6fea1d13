"""A Hugging Face folder for a task without a model: a word-level tokenizer, and a small model's config.json."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_edo.builtin_task.arithmetic import STEP_ERRORS
from nemo_edo.config import ArithmeticConfig
from nemo_edo.errors import UserError
from nemo_edo.utils.wording import did_you_mean

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
_WORDS = ("\n", " + ", " = ", "#### ")
_SMALLEST_MAX_NUMBER = 99
_PIECE = r"#### |[0-9]+| ?[A-Za-z]+| ?[^\sA-Za-z0-9] ?|\s"
"""What a token can be: the mark of an answer, a number, a word or a sign with the blanks around it, other white space.
Any text is a sequence of these."""
_VOCABULARY_MULTIPLE = 64
_FILLED_IN = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


def vocabulary(config: ArithmeticConfig) -> list[str]:
    """The tokens in the order of their ids: special ones, signs, every number of the data (from 0 to at least 99), and
    unused ones up to a multiple of 64, so that tensor-parallel ranks get equal shares."""
    # Every operand at its largest, every step wrong upwards.
    largest = config.num_operands * config.max_operand + max(STEP_ERRORS) * (config.num_operands - 1)
    return _filled_up([*_WORDS, *map(str, range(max(largest, _SMALLEST_MAX_NUMBER) + 1))])


def word_vocabulary(texts: Iterable[str]) -> list[str]:
    """The same for any task: the signs, numbers up to 99, and what else the texts hold, sorted."""
    numbers = [str(number) for number in range(_SMALLEST_MAX_NUMBER + 1)]
    found = {piece for text in texts for piece in re.findall(_PIECE, text)}
    return _filled_up([*_WORDS, *numbers, *sorted(found - {*_WORDS, *numbers})])


def _filled_up(words: Sequence[str]) -> list[str]:
    tokens = [PAD, EOS, UNKNOWN, *words]
    return tokens + [f"<unused_{index}>" for index in range(-len(tokens) % _VOCABULARY_MULTIPLE)]


def write_tokenizer(folder: str | Path, words: ArithmeticConfig | Sequence[str]) -> PreTrainedTokenizerFast:
    """Writes a tokenizer that ``AutoTokenizer.from_pretrained(folder)`` loads, and returns it. words: the settings of
    the arithmetic task, or the tokens of another (``word_vocabulary``). Decoding gives back any text of the task
    exactly; no token is put before it. Other text, and a number that is not in the vocabulary, becomes ``<unk>``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = vocabulary(words) if isinstance(words, ArithmeticConfig) else words
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # tokens carry their own spaces
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],  # generate() of an exported policy takes nothing else
    )
    fast.save_pretrained(str(folder))
    return fast


def write_base_model(
    folder: str | Path, architecture: Mapping[str, Any], words: ArithmeticConfig | Sequence[str]
) -> PretrainedConfig:
    """Writes the tokenizer and a config.json made of ``architecture``, without weights, and returns the config.
    ``architecture`` is ``model.architecture``: a ``model_type`` and fields of its Hugging Face config class. The
    vocabulary size and the ids of special tokens are filled in from the tokenizer. Raises UserError (a ValueError) for
    a model_type without a causal language model, an unknown field, or one that is filled in."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields = dict(architecture)
    model_type = fields.pop("model_type", None)
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"model.architecture.model_type is {model_type!r}, expected a causal language model of transformers"
            + did_you_mean(str(model_type), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        )
    default = AutoConfig.for_model(model_type)
    declared = inspect.signature(type(default).__init__).parameters
    # transformers silently keeps unknown fields: a misspelled one would leave its default in force.
    # head_dim is read by models whose config class does not declare it, such as Qwen2.
    # transformers 5 also takes the two names that rope_parameters had in version 4.
    known = {*default.to_dict(), *default.attribute_map, *declared, "head_dim", "rope_theta", "rope_scaling"}
    for name in fields:
        if name in _FILLED_IN:
            raise UserError(f"model.architecture.{name} is filled in from the built-in tokenizer; leave it out")
        if name not in known:
            kind = type(default).__name__
            raise UserError(f"model.architecture.{name} is not a field of {kind}{did_you_mean(name, known)}")
    tokenizer = write_tokenizer(folder, words)
    model = AutoConfig.for_model(
        model_type,
        **fields,
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(str(folder))
    return model
