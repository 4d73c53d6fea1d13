"""The formats of process reward models: their folders, how a path becomes token ids, and where scores are read.

=============================  ========================================================  ==========================
folder                         a path as text                                            score of a step
=============================  ========================================================  ==========================
Qwen2.5-Math-PRM               the chat template: a system prompt, the question, and     softmax over two classes
(Qwen2ForProcessRewardModel)   each step followed by ``<extra_0>``                       at its ``<extra_0>``
Skywork-o1-Open-PRM            BOS, question, line break; each step followed by one      sigmoid at the line break
(Qwen2ForPrmModel)             line break, a separate token                              that follows it
ours (``reward_model.json``)   question, line break; each step followed by one           sigmoid at its last token;
                               line break                                                an encoder reads each path
                                                                                         separately
=============================  ========================================================  ==========================

The first follows the model card of Qwen2.5-Math-PRM-7B (Zhang et al. 2025), the second Skywork's inference code
(skywork-o1-prm-inference, ``prepare_input``). Code in a model's folder is never run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from nemo_edo.data.prompts import Markup
from nemo_edo.data.tokenizer import load_tokenizer
from nemo_edo.errors import UserError
from nemo_edo.test_time.search_llm import StepPath
from nemo_edo.utils.files import read_object, write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OWN_FILE = "reward_model.json"  # the file that marks our folders, and describes how they encode paths
QWEN, SKYWORK = "Qwen2ForProcessRewardModel", "Qwen2ForPrmModel"
QWEN_STEP = "<extra_0>"
QWEN_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
DECODER, ENCODER = "decoder", "encoder"


@dataclass(frozen=True)
class Encoded:
    """One sequence for the model, and where its scores are read."""

    ids: tuple[int, ...]
    ends: tuple[int, ...]  # the position of the token at which each step's score is read, in order


@dataclass(frozen=True)
class OwnSettings:
    """The content of ``reward_model.json``."""

    kind: str  # decoder: one sequence scores all steps; encoder: each step needs a separate sequence
    separator: str
    version: int = 1


def split_steps(text: str, separator: str, *, keep_blanks: bool = False) -> tuple[str, ...]:
    """The texts between separators, without surrounding line breaks; blank steps are dropped, or each is a line break
    that begins the next step (``keep_blanks``)."""
    steps: list[str] = []
    blanks = ""
    for step in text.split(separator):
        if step.strip():
            steps.append(blanks + step.strip("\r\n"))
        blanks = "" if step.strip() or not keep_blanks else blanks + "\n"
    return tuple(steps)


class QwenFormat:
    separator = "\n\n"  # the default separator of two steps of a response
    keeps_blanks = False  # whether blank steps are part of the next one (``split_steps``)

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        folder = tokenizer.name_or_path
        if tokenizer.chat_template is None:
            raise UserError(f"{folder}: its tokenizer has no chat template, which a Qwen2.5-Math-PRM needs")
        self.step_id = _single_token(tokenizer, QWEN_STEP, "which ends the steps of a Qwen2.5-Math-PRM")
        self._markup = Markup(tokenizer, template=QWEN_STEP)

    def encode(self, path: StepPath) -> list[Encoded]:
        """The sequences whose positions, in order, give the scores of the path's steps. A path without steps has one
        score, at the end of the question. The other formats do likewise."""
        steps = [self._markup.text(step) for step in path.steps]
        messages = [
            {"role": "system", "content": QWEN_SYSTEM},
            {"role": "user", "content": self._markup.text(path.question)},
            {"role": "assistant", "content": "".join(step + QWEN_STEP for step in steps)},
        ][: 3 if steps else 2]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not steps)
        ids = tuple(self._markup.encode(text))
        ends = tuple(place for place, token in enumerate(ids) if token == self.step_id)
        if len(ends) != len(steps):
            raise UserError(
                f"{self._tokenizer.name_or_path}: its chat template made {len(ends)} {QWEN_STEP} of {len(steps)} steps"
            )
        return [Encoded(ids, ends or (len(ids) - 1,))]


class SkyworkFormat:
    separator = "\n"
    keeps_blanks = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        if tokenizer.bos_token is None:
            raise UserError(f"{tokenizer.name_or_path}: its tokenizer has no bos_token, which a Skywork PRM needs")
        self.step_id = _single_token(tokenizer, "\n", "which ends the steps of a Skywork PRM")
        self._markup = Markup(tokenizer)

    def encode(self, path: StepPath) -> list[Encoded]:
        ids = self._markup.encode(f"{self._tokenizer.bos_token}{self._markup.text(path.question)}\n")
        ends = []
        for step in path.steps:
            said = step.lstrip("\n")
            ids += [self.step_id] * (len(step) - len(said))  # blank lines, which its code gives a token each
            ids += [*self._markup.encode(self._markup.text(said)), self.step_id]
            ends.append(len(ids) - 1)
        return [Encoded(tuple(ids), tuple(ends) or (len(ids) - 1,))]


class OwnFormat:
    """Encodes question and steps separately, so that the tokens of a path are a prefix of those of every extension."""

    keeps_blanks = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: OwnSettings) -> None:
        self._tokenizer = tokenizer
        self._markup = Markup(tokenizer)
        self._settings = settings
        self.separator = settings.separator
        if settings.kind == ENCODER:
            self._first = [] if tokenizer.cls_token_id is None else [tokenizer.cls_token_id]
            self._last = [] if tokenizer.sep_token_id is None else [tokenizer.sep_token_id]
        else:
            begins = tokenizer.encode("", add_special_tokens=True)[:1]  # Llama's BOS, if any
            self._first, self._last = begins if begins == [tokenizer.bos_token_id] else [], []

    def encode(self, path: StepPath) -> list[Encoded]:
        lengths, ids = [], list(self._first)
        for text in (path.question, *path.steps):
            ids += self._markup.encode(self._markup.text(f"{text}\n"))
            lengths.append(len(ids))
        lengths = lengths[1:] or lengths
        if self._settings.kind == DECODER:
            return [Encoded(tuple(ids), tuple(length - 1 for length in lengths))]
        sequences = [(*ids[:length], *self._last) for length in lengths]
        return [Encoded(sequence, (len(sequence) - 1,)) for sequence in sequences]

    def last(self, path: StepPath) -> tuple[int, ...]:
        """The sequence at whose end the last step's score is read."""
        return self.encode(path)[-1].ids


RewardFormat = Union[QwenFormat, SkyworkFormat, OwnFormat]


@dataclass(frozen=True)
class RewardFolder:
    """What is known of a reward model's folder before its weights are loaded."""

    path: Path
    architecture: str  # the architecture that config.json names
    config: dict[str, Any]
    own: OwnSettings | None

    @property
    def max_length(self) -> int | None:
        """Tokens that the model accepts; None where its config does not say."""
        return self.config.get("max_position_embeddings")

    @property
    def is_encoder(self) -> bool:
        return self.own is not None and self.own.kind == ENCODER


def read_reward_folder(path: Path) -> RewardFolder:
    """Raises UserError for a folder that is not a supported process reward model."""
    config = read_object(path / "config.json", ())
    architecture = next(iter(config.get("architectures") or []), None)
    own = path / OWN_FILE
    if own.is_file():
        values = read_object(own, ())
        known = values.keys() == {"kind", "separator", "version"} and values["version"] == 1
        if not known or values["kind"] not in (DECODER, ENCODER) or not isinstance(values["separator"], str):
            raise UserError(f"{own}: has {values}, expected version 1, a kind decoder or encoder, and a separator")
        return RewardFolder(path, architecture or "", config, OwnSettings(**values))
    if architecture not in (QWEN, SKYWORK):
        raise UserError(
            f"{path / 'config.json'}: architectures is {config.get('architectures')}, expected {QWEN} "
            f"(Qwen2.5-Math-PRM), {SKYWORK} (Skywork-o1-Open-PRM), or a folder with {OWN_FILE} (of nemo-edo train)"
        )
    return RewardFolder(path, architecture, config, None)


def load_format(folder: RewardFolder) -> RewardFormat:
    """The folder's format, with its tokenizer. Raises UserError for a tokenizer that lacks what the format needs."""
    tokenizer = load_tokenizer(folder.path)
    if folder.own is not None:
        return OwnFormat(tokenizer, folder.own)
    return (QwenFormat if folder.architecture == QWEN else SkyworkFormat)(tokenizer)


def write_own_settings(folder: Path, settings: OwnSettings) -> None:
    write_text(folder / OWN_FILE, json.dumps(asdict(settings), indent=2) + "\n")


def too_long(encoded: Sequence[Sequence[Encoded]], limit: int | None) -> list[int]:
    """The indices of paths that have a sequence of more than ``limit`` tokens (None: no limit)."""
    if limit is None:
        return []
    return [place for place, parts in enumerate(encoded) if any(len(part.ids) > limit for part in parts)]


def _single_token(tokenizer: PreTrainedTokenizerBase, text: str, what: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise UserError(
            f"{tokenizer.name_or_path}: its tokenizer has no token {text!r}, {what}; copy the model's own tokenizer "
            "files there"
        )
    return ids[0]
