"""Problems as token ids: prompts, and prompt-solution pairs for SFT. Special tokens in a user's text stay text."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_edo.data.chat import SETTING, ChatTemplate, Message, chat_template, why
from nemo_edo.errors import UserError
from nemo_edo.types import Problem
from nemo_edo.utils.wording import did_you_mean
from nemo_edo.utils.worker_pool import TaskFailure

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    from nemo_edo.config import DataConfig

TokenIds = tuple[int, ...]
REMEDY = f"set {SETTING} to a file or to false, or what it needs (data.system_prompt, data.chat_template_kwargs)"
_DECODED = 32  # prompts whose tokens are read again as text
_CONTENT, _REPLY = "text", "reply"
_OURS, _USERS = 0x100000, 0x108000
"""The first of the private characters that stand for markup that is meant, and for text that looks like it."""
_PRIVATE, _USERS_PRIVATE = (re.compile(f"[{chr(first)}-{chr(0x10FFFF)}]") for first in (_OURS, _USERS))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The special tokens and their ids, but for white space, which some models have among them."""
    added = {token.content: one for one, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {text: one for text, one in added.items() if text.strip()}


class Markup:
    """Marks what a user wrote (``text``), and encodes what is made of it. Markup are the tokenizer's special tokens but
    for ``kept``, and its other added tokens that are in ``template`` (some models have ``<|user|>`` among those)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kept: Collection[str] = (), template: str = "") -> None:
        self._tokenizer = tokenizer
        special = special_tokens(tokenizer)
        added = (token.content for token in tokenizer.added_tokens_decoder.values())
        found = {text for text in added if text in special or (text.strip() and text in template)} - {*kept}
        # A token that begins with another one comes before it.
        self._tokens = sorted(found, key=lambda text: (-len(text), text))
        self._names = {text: place for place, text in enumerate(self._tokens)}
        # Some models have thousands; nearly all begin with "<", so that few places of a text are looked at.
        first = "".join(map(re.escape, {text[0] for text in found}))
        self._pattern = re.compile(f"(?=[{first}])(?:{'|'.join(map(re.escape, self._tokens))})" if found else "(?!)")

    def text(self, text: str) -> str:
        """A user's text with a private character in place of each token in it; its own private ones are lost."""
        text = _PRIVATE.sub("\ufffd", text)
        return self._pattern.sub(lambda match: chr(_USERS + self._names[match[0]]), text)

    def found_in(self, text: str) -> set[str]:
        """The tokens that a user's text has in it."""
        return {match[0] for match in self._pattern.finditer(text)}

    def plain(self, text: str) -> str:
        """What a person reads of such a text."""
        return _USERS_PRIVATE.sub(lambda match: self._tokens[ord(match[0]) - _USERS], text)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of a text with users' parts. special: with what the tokenizer puts around texts. Raises UserError for
        a tokenizer that cannot write a special token as text."""
        encode = self._tokenizer.encode
        if not _PRIVATE.search(text):
            return encode(text, add_special_tokens=special)
        tokenizer, ids = self._renamed
        ours = self._pattern.sub(lambda match: chr(_OURS + self._names[match[0]]), text)
        found = tokenizer.encode(self.plain(ours), add_special_tokens=False).ids
        meant = {self._tokenizer.convert_tokens_to_ids(token): token for token in self._names}
        if wrong := next((meant[one] for one in found if one not in ids and one in meant), None):
            raise UserError(f"the tokenizer {self._tokenizer.name_or_path!r} writes {wrong} as its special token only")
        found = [ids.get(one, one) for one in found]
        if special:
            plain, whole = encode("x", add_special_tokens=False), encode("x", add_special_tokens=True)
            at = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
            found = [*whole[:at], *found, *whole[at + len(plain) :]]
        return found

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[int, int]]:
        """A tokenizer whose markup is private characters, and the own ids of its added tokens."""
        from tokenizers import Tokenizer

        own = getattr(self._tokenizer, "backend_tokenizer", None)
        if own is None:
            raise UserError(
                f"the tokenizer {self._tokenizer.name_or_path!r} has no tokenizer.json, and without it special tokens "
                "in problems cannot be told from the template's"
            )
        fields = json.loads(own.to_str())
        for token in fields["added_tokens"]:
            place = self._names.get(token["content"])
            token["content"] = token["content"] if place is None else chr(_OURS + place)
        made = Tokenizer.from_str(json.dumps(fields))
        made.no_truncation()
        made.no_padding()
        return made, {made.token_to_id(token["content"]): token["id"] for token in fields["added_tokens"]}


@dataclass(frozen=True)
class PromptStyle:
    template: str  # the text around {question}
    chat: ChatTemplate | None = None
    """What makes a prompt of the rendered text, the user's message, or of a problem's messages; None: it is text."""
    kept: tuple[str, ...] = ()  # special tokens that are words like any others (``data.keep_special_tokens``)


def prompt_style(data: DataConfig, tokenizer: PreTrainedTokenizerBase, now: datetime | None = None) -> PromptStyle:
    """The style that the settings make with a tokenizer. now: the time that a template writes. Raises UserError where
    the template cannot be used, or the tokenizer has no such special token as ``data.keep_special_tokens``."""
    kept = data.keep_special_tokens
    known = special_tokens(tokenizer)
    for token in kept:
        if token not in known:
            has = did_you_mean(token, known) or f" (it has {', '.join(known)})"
            raise UserError(f"data.keep_special_tokens: the tokenizer has no special token {token!r}{has}")
    chat = chat_template(data, tokenizer, now or datetime.now())
    for name in ("system_prompt", "chat_template_kwargs"):
        if chat is None and getattr(data, name):  # which data.chat_template=false refuses already
            has = f"data.chat_template is auto, and the tokenizer {tokenizer.name_or_path!r} has none"
            raise UserError(f"data.{name} is set, but prompts have no chat template: {has}")
    return PromptStyle(data.prompt, chat, tuple(kept))


def left_out_tokens(tokenizer: PreTrainedTokenizerBase, style: PromptStyle) -> frozenset[int] | None:
    """The special tokens that responses' texts are without; None: all."""
    special = special_tokens(tokenizer)
    every = (one for one, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset(every) - {special[token] for token in style.kept} if style.kept else None


def warnings_of(
    problems: Sequence[Problem], prompts: Mapping[str, TokenIds], tokenizer: PreTrainedTokenizerBase,
    style: PromptStyle, pattern: str, ends: Collection[int],
) -> list[str]:  # fmt: skip
    """Warnings of special tokens in questions, which stay text, of those that ``data.prompt`` or
    ``data.answer_pattern`` (``pattern``) asks for and responses' texts are without, and of a begin token that a chat
    template does not write. ends: of responses."""
    said, begin, markup = [], tokenizer.bos_token_id, Markup(tokenizer, style.kept)
    rendered = [
        (problem.source, found) for problem in problems if (found := markup.found_in(_said_in(problem)))
    ]  # fmt: skip
    if rendered:
        source, found = rendered[0]
        said.append(
            f"warning: {len(rendered)} of {len(problems)} questions have special tokens, which the model reads as "
            f"plain text, such as {', '.join(sorted(found))} in {source}; where a chat template has written them, give "
            "the questions alone"
        )
    asked = [
        token for token, one in special_tokens(tokenizer).items()
        if token not in style.kept and one not in ends and token in style.template + pattern.replace("\\", "")
    ]  # fmt: skip
    if asked:
        listed = ",".join(f"'{token}'" for token in asked)
        said.append(
            f"warning: {', '.join(asked)}: special tokens of the tokenizer, which responses' texts are without, so "
            f'that no answer pattern or reward sees them; "data.keep_special_tokens=[{listed}]" keeps them'
        )
    first = next(iter(prompts.values()), ())
    if style.chat and begin is not None and begin not in first and begin in tokenizer.encode(""):
        said.append(
            f"warning: {style.chat.name} writes no {tokenizer.bos_token}, which the tokenizer puts before a text"
        )
    return said


def _said_in(problem: Problem) -> str:
    return "\n".join(message["content"] for message in problem.messages) if problem.messages else problem.question


def warnings_of_turns(chat: ChatTemplate, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> list[str]:
    """A warning where the special token that a chat template writes after the model's reply is not one of ``ends``, the
    tokens that end a response."""
    answered = [{"role": "user", "content": _CONTENT}, {"role": "assistant", "content": _REPLY}]
    [text] = chat.render([answered], closed=(0,))
    after = text.rpartition(_REPLY)[2].lstrip() if isinstance(text, str) and _REPLY in text else ""
    special = special_tokens(tokenizer)
    end = max((token for token in special if after.startswith(token)), key=len, default=None)
    if end is None or special[end] in ends:
        return []
    return [
        f"warning: {chat.name} ends the model's turn with {end}, which does not end a response: generation "
        f"continues after it; sampling.stop_token_ids=[{special[end]}] makes it an end"
    ]


def encode_prompts(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    style: PromptStyle,
    *,
    max_prompt_tokens: int | None,
    ends: Collection[int] = (),
) -> dict[str, TokenIds]:
    """Prompt token ids by problem id.

    What the tokenizer puts in front by itself (Llama's BOS) is kept: a template must not write it a second time. A chat
    template writes all special tokens, and nothing is added to them. Special tokens in a problem stay text.
    ``max_prompt_tokens`` is what the response leaves of the context; None: there is no limit. ends: further tokens that
    end a response. Raises UserError if a prompt is longer, has text that the tokenizer does not know, or is not what
    the model should be asked (``_check_prompt``)."""
    prompts = _encode_prompts(problems, tokenizer, style, ends)
    limit = (max_prompt_tokens, "that sampling.max_new_tokens leaves of model.seq_length")
    remedy = "raise model.seq_length, lower sampling.max_new_tokens"
    _require_fit(problems, list(map(len, prompts)), "prompt", *limit, remedy)
    return {problem.id: ids for problem, ids in zip(problems, prompts, strict=True)}


def _encode_prompts(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, style: PromptStyle, ends: Collection[int]
) -> list[TokenIds]:
    if not problems:
        return []
    chat = style.chat
    written, name = (style.template, "data.prompt") if chat is None else (chat.text, chat.name)
    if _PRIVATE.search(written):
        raise UserError(f"{name} has a private character beyond U+100000, by which users' text is marked; remove it")
    if chat is None:
        if told := next((problem for problem in problems if problem.messages), None):
            raise UserError(
                f"{told.source}: has messages, and without a chat template a prompt is one text; set "
                "data.chat_template to a file, or model.path to a model that was trained to chat"
            )
        markup, asked = Markup(tokenizer, style.kept), [(problem.question,) for problem in problems]
        # Other braces stay as they are.
        texts = [style.template.replace("{question}", markup.text(problem.question)) for problem in problems]
    else:
        chats = [chat.messages(_messages(problem, style.template)) for problem in problems]
        visible, after_question = require_begun(chat, chats[0], problems[0].source)
        markup = Markup(tokenizer, style.kept, visible)
        # Phi-3 begins the model's turn with one of its end tokens.
        ends = {*ends}.intersection(tokenizer.encode(after_question, add_special_tokens=False))
        asked = [tuple(one["content"] for one in messages if one["role"] in ("system", "user")) for messages in chats]
        texts = chat.render([[{**one, "content": markup.text(one["content"])} for one in each] for each in chats])
    prompts = []
    for place, (problem, said, text) in enumerate(zip(problems, asked, texts, strict=True)):
        if isinstance(text, TaskFailure):
            raise UserError(f"{problem.source}: {chat.name} {why(text)}; {REMEDY}")
        ids = _encode(text, tokenizer, markup, problem, special=chat is None)
        read = [markup.plain(text), *([tokenizer.decode(ids)] if place < _DECODED else [])]
        _check_prompt(ids, said, read, problem.source, tokenizer, chat and chat.name, {tokenizer.eos_token_id, *ends})
        prompts.append(ids)
    return prompts


def encode_solutions(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, style: PromptStyle, seq_length: int | None
) -> list[tuple[TokenIds, TokenIds]]:
    """(prompt ids, solution ids with the end-of-sequence token) of each problem, in order; encoded separately, so that
    the prompt's tokens are the ones that generation sees. Raises UserError if both together exceed ``seq_length``
    tokens (None: there is no limit), or the tokenizer has no end-of-sequence token or does not know the text."""
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end-of-sequence token, expected eos_token in its tokenizer_config.json")
    markup, pairs = Markup(tokenizer, style.kept), []
    for problem, ids in zip(problems, _encode_prompts(problems, tokenizer, style, ()), strict=True):
        solution = _encode(markup.text(problem.solution), tokenizer, markup, problem)
        pairs.append((ids, (*solution, tokenizer.eos_token_id)))
    lengths = [len(prompt) + len(solution) for prompt, solution in pairs]
    limit = (seq_length, "of model.seq_length")
    _require_fit(problems, lengths, "prompt with its solution", *limit, "raise model.seq_length")
    return pairs


def messages_of(problem: Problem, style: PromptStyle) -> Sequence[Message]:
    """The messages that a chat endpoint gets, which applies a chat template itself."""
    asked = _messages(problem, style.template)
    return style.chat.messages(asked) if style.chat else asked


def prompt_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text that a server, which puts in front what the tokenizer does by itself, reads as these tokens."""
    in_front = tokenizer.encode("")[:1] == list(ids[:1]) == [tokenizer.bos_token_id]
    return tokenizer.decode(ids[in_front:], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _messages(problem: Problem, template: str) -> Sequence[Message]:
    return problem.messages or [{"role": "user", "content": template.replace("{question}", problem.question)}]


def _encode(
    text: str, tokenizer: PreTrainedTokenizerBase, markup: Markup, problem: Problem, *, special: bool = False
) -> TokenIds:
    try:
        ids = tuple(markup.encode(text, special=special))
    except UserError as error:
        raise UserError(f"{problem.source}: {error}") from error
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


def require_begun(chat: ChatTemplate, messages: Sequence[Message], source: str) -> tuple[str, str]:
    """The text that the template visibly writes around such messages, and what follows the last one where the reply is
    not begun. Raises UserError where it does not begin the reply."""
    empty = [{**message, "content": _CONTENT} for message in messages]
    answered = [*empty, {"role": "assistant", "content": _REPLY}]
    prompt, closed, reply, asked_again = chat.render(
        [empty, empty, answered, [*answered, {"role": "user", "content": _CONTENT}]], closed=(1, 2, 3)
    )
    if isinstance(prompt, TaskFailure):
        raise UserError(f"{source}: {chat.name} {why(prompt)}; {REMEDY}")
    # Mistral's always begins it, add_generation_prompt or not: a reply follows immediately. What precedes the last
    # question may differ, since Mistral's has the system message there and only there.
    end = prompt[prompt.rfind(_CONTENT) :].rstrip()
    follows = isinstance(reply, str) and reply.rpartition(_REPLY)[0].rstrip().endswith(end)
    if prompt == closed and not follows and _CONTENT in prompt:  # without it, the question is what is missed
        raise UserError(
            f"{source}: {chat.name} does not begin the model's turn: add_generation_prompt changes nothing, and the "
            f"prompt ends with {prompt[-30:]!r}; {REMEDY}"
        )
    closed, asked_again = (text if isinstance(text, str) else "" for text in (closed, asked_again))
    return asked_again or closed, closed[closed.rfind(_CONTENT) :]


def _check_prompt(
    ids: TokenIds, asked: Sequence[str], read: Sequence[str], source: str, tokenizer: PreTrainedTokenizerBase,
    template: str | None, ends: Collection[int | None],
) -> None:  # fmt: skip
    """Raises UserError for a prompt that is empty, lacks its question, begins with two begin tokens, or ends with an
    end token. asked: what the user and the system say in it. read: its text, and that of its tokens or nothing.
    template: the chat template's name, if prompts have one."""
    named, begin = f"the tokenizer {tokenizer.name_or_path!r}", tokenizer.bos_token_id
    if not ids:
        raise UserError(f"{source}: the prompt has no tokens; {template or named} leaves nothing of it")
    if lost := _lost(asked, read[0]):
        raise UserError(f"{source}: {template or 'data.prompt'} leaves out {lost[:80]!r}; {REMEDY}")
    if read[1:] and (lost := _lost(asked, read[1])):
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


def check_rows(
    sequences: Iterable[Sequence[int]], ends: Sequence[int], tokenizer: PreTrainedTokenizerBase,
    fields: Mapping[str, Any], config: Path,
) -> None:  # fmt: skip
    """Raises UserError where the model's embedding has no row for a token of prompts and solutions, or for any end."""
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
    """The first that is not in the text, up to white space, case and compatible characters, which may be changed."""
    if all(one in text for one in asked):
        return None
    plain = _plain(text)
    return next((one for one in asked if _plain(one) not in plain), None)


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())
