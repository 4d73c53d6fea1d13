"""A Hugging Face folder for the built-in task: its word-level tokenizer, and a small model's config.json."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_edo.builtin_task.arithmetic import max_number
from nemo_edo.config import ArithmeticConfig
from nemo_edo.errors import UserError
from nemo_edo.utils.wording import did_you_mean

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
_WORDS = ("\n", " + ", " = ", "#### ")
_SMALLEST_MAX_NUMBER = 99
_VOCABULARY_MULTIPLE = 64
_FILLED_IN = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


def vocabulary(config: ArithmeticConfig) -> list[str]:
    """The tokens in the order of their ids: special ones, signs, numbers from 0, then unused ones.

    Every number of the data is one token, and those up to 99 are there whatever the operands. Unused tokens fill up
    to a multiple of 64, so that tensor-parallel ranks get equal shares.
    """
    numbers = range(max(max_number(config), _SMALLEST_MAX_NUMBER) + 1)
    tokens = [PAD, EOS, UNKNOWN, *_WORDS, *map(str, numbers)]
    return tokens + [f"<unused_{index}>" for index in range(-len(tokens) % _VOCABULARY_MULTIPLE)]


def write_tokenizer(folder: str | Path, config: ArithmeticConfig) -> PreTrainedTokenizerFast:
    """Writes a tokenizer that ``AutoTokenizer.from_pretrained(folder)`` loads, and returns it.

    Decoding gives back any text of the task exactly; no token is put before it. Other text, and a number that is
    not in the vocabulary, becomes ``<unk>``.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: index for index, token in enumerate(vocabulary(config))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[0-9]+| \+ | = |\n|#### "), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # tokens carry their own spaces
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(str(folder))
    return fast


def write_base_model(folder: str | Path, architecture: Mapping[str, Any], config: ArithmeticConfig) -> PretrainedConfig:
    """Writes the tokenizer and a config.json made of ``architecture``, without weights, and returns the config.

    ``architecture`` is ``model.architecture``: a ``model_type`` and fields of its Hugging Face config class. The
    vocabulary size and the ids of special tokens are filled in from the tokenizer.

    Raises UserError (a ValueError) for a model_type without a causal language model, an unknown field, or one that is
    filled in.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields = dict(architecture)
    model_type = fields.pop("model_type", None)
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"model.architecture.model_type is {model_type!r}, expected a causal language model of transformers"
            + did_you_mean(str(model_type), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        )
    _check_fields(fields, AutoConfig.for_model(model_type))
    tokenizer = write_tokenizer(folder, config)
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


def _check_fields(fields: dict[str, Any], default: PretrainedConfig) -> None:
    """transformers silently keeps unknown fields: a misspelled one would leave its default in force."""
    declared = inspect.signature(type(default).__init__).parameters
    # head_dim is read by models whose config class does not declare it, such as Qwen2.
    known = {*default.to_dict(), *default.attribute_map, *declared, "head_dim"}
    for name in fields:
        if name in _FILLED_IN:
            raise UserError(f"model.architecture.{name} is filled in from the built-in tokenizer; leave it out")
        if name not in known:
            kind = type(default).__name__
            raise UserError(f"model.architecture.{name} is not a field of {kind}{did_you_mean(name, known)}")
