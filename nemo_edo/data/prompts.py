"""Problems as token ids: prompts for generation, and prompt-solution pairs for supervised training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_edo.errors import UserError
from nemo_edo.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class PromptStyle:
    template: str
    """The text around {question}."""
    chat: bool
    """Whether the rendered text is the user's message in the tokenizer's chat template, the model's turn begun."""


def prompt_style(template: str, chat_template: str, tokenizer: PreTrainedTokenizerBase) -> PromptStyle:
    """The style that ``data.prompt`` and ``data.chat_template`` (auto, true, false) make with a tokenizer.

    Raises UserError (a ValueError) if a chat template is asked for and the tokenizer has none.
    """
    has_one = tokenizer.chat_template is not None
    if chat_template == "true" and not has_one:
        raise UserError(
            f"data.chat_template is true, but the tokenizer {tokenizer.name_or_path!r} has no chat template; set it to "
            "false, or model.path to a model that was trained to chat"
        )
    return PromptStyle(template, chat_template != "false" and has_one)


def render_prompt(template: str, question: str) -> str:
    """The template with ``{question}`` replaced; other braces stay as they are."""
    return template.replace("{question}", question)


def encode_prompts(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    style: PromptStyle,
    *,
    max_prompt_tokens: int | None,
) -> dict[str, TokenIds]:
    """Prompt token ids by problem id.

    What the tokenizer puts in front by itself (Llama's BOS) is kept: a template must not write it a second time. A chat
    template writes all special tokens, and nothing is added to them. ``max_prompt_tokens`` is what the response leaves
    of the context; None: there is no limit.

    Raises UserError (a ValueError) if a prompt is longer, or holds text that the tokenizer does not know.
    """
    prompts = {problem.id: _encode_prompt(problem, tokenizer, style) for problem in problems}
    lengths = [len(prompts[problem.id]) for problem in problems]
    limit = (max_prompt_tokens, "that sampling.max_new_tokens leaves of model.seq_length")
    _require_fit(problems, lengths, "prompt", *limit, "raise model.seq_length, lower sampling.max_new_tokens")
    return prompts


def encode_solutions(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, style: PromptStyle, seq_length: int | None
) -> list[tuple[TokenIds, TokenIds]]:
    """(prompt ids, solution ids with the end-of-sequence token) of each problem, in order.

    Prompt and solution are encoded separately, so that the prompt's tokens are the ones that generation sees.

    Raises UserError (a ValueError) if prompt and solution together exceed ``seq_length`` tokens (None: there is no
    limit), the tokenizer has no end-of-sequence token, or does not know the text.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end-of-sequence token, expected eos_token in its tokenizer_config.json")
    pairs = []
    for problem in problems:
        solution = _encode(problem.solution, tokenizer, problem, special=False)
        pairs.append((_encode_prompt(problem, tokenizer, style), (*solution, tokenizer.eos_token_id)))
    lengths = [len(prompt) + len(solution) for prompt, solution in pairs]
    limit = (seq_length, "of model.seq_length")
    _require_fit(problems, lengths, "prompt with its solution", *limit, "raise model.seq_length")
    return pairs


def _encode_prompt(problem: Problem, tokenizer: PreTrainedTokenizerBase, style: PromptStyle) -> TokenIds:
    text = render_prompt(style.template, problem.question)
    if style.chat:
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return _encode(text, tokenizer, problem, special=not style.chat)


def _encode(text: str, tokenizer: PreTrainedTokenizerBase, problem: Problem, *, special: bool) -> TokenIds:
    ids = tuple(tokenizer.encode(text, add_special_tokens=special))
    # GPT-2 and its kin use one token for both "unknown" and "end": only a separate token means unknown text.
    if tokenizer.unk_token_id != tokenizer.eos_token_id and tokenizer.unk_token_id in ids:
        raise UserError(
            f"{problem.source}: the tokenizer {tokenizer.name_or_path!r} does not know a part of {text!r}; "
            "set model.path to a folder whose tokenizer covers the data"
        )
    return ids


def _require_fit(
    problems: Sequence[Problem], lengths: list[int], what: str, limit: int | None, room: str, remedy: str
) -> None:
    """Raises UserError if a length exceeds the limit; it names the longest, whose length settles the new limit."""
    if not problems or limit is None or max(lengths) <= limit:
        return
    longest = lengths.index(max(lengths))
    too_long = sum(length > limit for length in lengths)
    raise UserError(
        f"{problems[longest].source}: the {what} has {lengths[longest]} tokens, more than the {limit} {room}; "
        f"{remedy}, or leave the row out ({too_long} of {len(lengths)} rows are too long, this one is the longest)"
    )
