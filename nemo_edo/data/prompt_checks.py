"""Whether prompts ask what the user means: what a template or a tokenizer can do to them without an error."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_edo.data.chat import SETTING, ChatTemplate, Failure, Message
from nemo_edo.errors import UserError
from nemo_edo.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REMEDY = f"set {SETTING} to a file or to false, or what it needs (data.system_prompt, data.chat_template_kwargs)"
_DECODED = 32
"""Prompts whose tokens are read again as text."""
_CONTENT, _REPLY = "text", "reply"


@dataclass(frozen=True)
class Prompt:
    problem: Problem
    asked: tuple[str, ...]
    """What the user and the system say in it."""
    text: str
    ids: tuple[int, ...]


def require_begun(chat: ChatTemplate, messages: Sequence[Message], source: str) -> str:
    """What the template writes around such messages, as far as it can be seen. Raises UserError where the model's turn
    has not begun at a prompt's end."""
    empty = [{**message, "content": _CONTENT} for message in messages]
    answered = [*empty, {"role": "assistant", "content": _REPLY}]
    prompt, closed, reply, asked_again = chat.render(
        [empty, empty, answered, [*answered, {"role": "user", "content": _CONTENT}]], closed=(1, 2, 3)
    )
    if isinstance(prompt, Failure):
        raise UserError(f"{source}: {chat.name} {prompt.reason}; {REMEDY}")
    # Mistral's always begins it, add_generation_prompt or not: a reply follows immediately.
    follows = isinstance(reply, str) and reply.startswith(prompt) and reply[len(prompt) :].lstrip().startswith(_REPLY)
    if prompt == closed and not follows and _CONTENT in prompt:  # without it, the question is what is missed
        raise UserError(
            f"{source}: {chat.name} does not begin the model's turn: add_generation_prompt changes nothing, and the "
            f"prompt ends with {prompt[-30:]!r}; {REMEDY}"
        )
    return next((text for text in (asked_again, closed) if isinstance(text, str)), "")


def check_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, template: str | None, ends: Collection[int | None]
) -> None:
    """template: the chat template's name, if prompts have one.

    Raises UserError for a prompt that is empty, lacks its question, begins with two begin tokens, ends with an end
    token, or is another question's.
    """
    named, begin = f"the tokenizer {tokenizer.name_or_path!r}", tokenizer.bos_token_id
    seen: dict[tuple[int, ...], Prompt] = {}
    for place, prompt in enumerate(prompts):
        ids, source = prompt.ids, prompt.problem.source
        if not ids:
            raise UserError(f"{source}: the prompt has no tokens; {template or named} leaves nothing of it")
        if lost := _lost(prompt.asked, prompt.text):
            raise UserError(f"{source}: {template or 'data.prompt'} leaves out {lost[:80]!r}; {REMEDY}")
        if place < _DECODED and (lost := _lost(prompt.asked, tokenizer.decode(ids))):
            raise UserError(f"{source}: {named} changes {lost[:80]!r}, which its tokens do not say")
        if ids[:2] == (begin, begin):
            raise UserError(
                f"{source}: the prompt begins with two {tokenizer.bos_token}: "
                + (f"{template} writes both" if template else f"{named} puts one before data.prompt; remove it there")
            )
        if ids[-1] in ends:
            adds = template is None and tokenizer.encode("x")[-1] == ids[-1]
            by = template or (f"{named} (its post_processor) puts it after a text" if adds else "data.prompt has it")
            end = tokenizer.convert_ids_to_tokens(ids[-1])
            raise UserError(f"{source}: the prompt ends with {end}, which ends a response: {by}")
        other = seen.setdefault(ids, prompt)
        if _plain("".join(other.asked)) != _plain("".join(prompt.asked)):
            raise UserError(
                f"{source}: its prompt is that of {other.problem.source}, though its question is another one; "
                f"{template or 'data.prompt'} or {named} loses the difference"
            )


def check_rows(
    sequences: Iterable[Sequence[int]], ends: Sequence[int], tokenizer: PreTrainedTokenizerBase,
    fields: Mapping[str, Any], config: Path,
) -> None:  # fmt: skip
    """Raises UserError for a token that the model's embedding has no row for, among those of the prompts and solutions
    and where all ends of a response are such."""
    rows = fields.get("vocab_size", (fields.get("text_config") or {}).get("vocab_size"))
    if not isinstance(rows, int):
        return
    highest = max([min(ends), *map(max, filter(None, sequences))])
    if highest >= rows:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has {len(tokenizer)} tokens, but {config} has vocab_size "
            f"{rows}, and prompts, solutions or ends of responses have {tokenizer.convert_ids_to_tokens(highest)!r} "
            f"(token {highest}); resize the model's embedding (resize_token_embeddings), or copy the model's own "
            "tokenizer there"
        )


def _lost(asked: Sequence[str], text: str) -> str | None:
    """The first of these that is not in the text. Templates trim messages, and tokenizers may change white space, case
    and compatible characters."""
    if all(one in text for one in asked):
        return None
    plain = _plain(text)
    return next((one for one in asked if _plain(one) not in plain), None)


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())
