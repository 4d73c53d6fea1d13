"""A tokenizer's chat template, rendered in a worker process, and chats in data.

A template is a program that came with the model: it may run for ever, or take all memory.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_edo.data.rows import RowError, text_of
from nemo_edo.errors import UserError
from nemo_edo.utils.wording import did_you_mean, shown
from nemo_edo.utils.worker_pool import OUT_OF_MEMORY, TIMED_OUT, Limits, TaskFailure, WorkerPool

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerBase

    from nemo_edo.config import DataConfig

Message = Mapping[str, str]  # a role and a content
SETTING = "data.chat_template"
SECONDS = 10  # CPU time of one conversation, for which a template needs about a millisecond
MEMORY_MB = 1024


@dataclass(frozen=True)
class ChatTemplate:
    text: str
    name: str  # the template's name in error messages
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template: the tokenizer's (``bos_token``) and ``data.chat_template_kwargs``."""
    system_prompt: str | None = None
    now: datetime = field(default_factory=datetime.now)  # the time that ``strftime_now`` writes

    def messages(self, chat: Sequence[Message]) -> list[Message]:
        """A problem's messages after ``system_prompt``, unless they have a system message."""
        own = self.system_prompt is None or any(message["role"] == "system" for message in chat)
        return [*([] if own else [{"role": "system", "content": self.system_prompt}]), *chat]

    def render(self, chats: Sequence[Sequence[Message]], *, closed: Collection[int] = ()) -> list[str | TaskFailure]:
        """The text of each chat, or why it has none. closed: places of those without a beginning of the model's turn.
        Raises UserError for a template that Jinja cannot read."""
        # Templates test what they do not get for being none or defined.
        shared = {"tools": None, "documents": None, **self.variables}
        return self._run([
            {**shared, "messages": list(chat), "add_generation_prompt": place not in closed}
            for place, chat in enumerate(chats)
        ])[1:]  # fmt: skip

    def _run(self, variables: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The names of the template's variables, and its text, or a TaskFailure, for each of these."""
        # Prepared: a worker that loads Jinja first may use up a conversation's time with it.
        pool = WorkerPool(Limits(SECONDS, MEMORY_MB, workers=1, budget_s=SECONDS), prepare=f"{__name__}:_compiled")
        try:
            found = pool.run(f"{__name__}:_rendered", [(self.text, self.now, one) for one in (None, *variables)])
        finally:
            pool.close()
        if isinstance(found[0], TaskFailure):
            raise UserError(f"{self.name} {why(found[0])}; correct it, or set {SETTING} to a file or to false")
        return found


def why(failure: TaskFailure) -> str:
    """Why a conversation has no text, after the template's name."""
    limits = {TIMED_OUT: f"took more than {SECONDS} s of CPU time", OUT_OF_MEMORY: f"takes more than {MEMORY_MB} MiB"}
    status = f" ({failure.exit_status})" if failure.exit_status else ""
    return limits.get(failure, f"{failure.reason}{status}")


def _rendered(template: str, now: datetime, variables: Mapping[str, Any] | None) -> str | list[str] | TaskFailure:
    """In a worker: the template's text with these variables, or without any the names of those that it reads."""
    from jinja2 import TemplateNotFound, TemplateSyntaxError

    try:
        compiled, names = _compiled(template, now)
        return names if variables is None else _text(compiled, variables)
    except MemoryError:
        raise
    except TemplateSyntaxError as error:
        return TaskFailure(f"has a syntax error in line {error.lineno}: {error.message}")
    except TemplateNotFound as error:
        return TaskFailure(f"includes another file ({error.name}), which is not read: write it into the template")
    except Exception as error:  # a template can raise anything
        return TaskFailure(f"raised {type(error).__name__}: {error}".removesuffix(": "))


def _text(template: Template, variables: Mapping[str, Any]) -> str:
    """The text of a conversation. Some templates of models that also see images take lists of parts alone."""
    text, messages = template.render(**variables), variables["messages"]
    asked = messages[-1]["content"].strip()
    if asked not in text:
        parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
        with suppress(Exception):  # of a template that takes texts alone
            of_parts = template.render(**{**variables, "messages": parts})
            return of_parts if asked in of_parts else text
    return text


@cache
def _compiled(template: str = "", now: datetime = datetime.min) -> tuple[Template, list[str]]:
    """The template and the names of its variables, in a sandbox like ``transformers``' whose clock stands still."""
    from jinja2 import DictLoader, TemplateError, ext, meta, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """``{% generation %}`` marks the model's text for those who train on it, and changes nothing."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def random(*values: Any, **options: Any) -> None:
        raise TemplateError("it draws at random, so that a resumed run would ask other prompts")

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols], loader=DictLoader({})
    )
    jinja.filters |= {"tojson": tojson, "random": random}
    jinja.globals |= {"raise_exception": raise_exception, "strftime_now": now.strftime, "lipsum": random}
    return jinja.from_string(template), sorted(meta.find_undeclared_variables(jinja.parse(template)))


def chat_template(data: DataConfig, tokenizer: PreTrainedTokenizerBase, now: datetime) -> ChatTemplate | None:
    """The template that ``data.chat_template`` (auto, true, false, a file, or one of several names) asks for; None:
    prompts are text. Raises UserError for one that is missing or cannot be used, and for several without a default."""
    asked, variables = data.chat_template, data.chat_template_kwargs
    if asked == "false":
        return None
    named, folder = tokenizer.chat_template, tokenizer.name_or_path
    several = named if isinstance(named, dict) else {}
    if asked in several:
        text, name = several[asked], f"the chat template {asked!r} of {folder}"
    elif asked not in ("auto", "true"):
        try:
            text, name = Path(asked).read_text(encoding="utf-8"), f"the chat template {asked}"
        except (OSError, UnicodeDecodeError) as error:
            names = "".join(f", {one}" for one in several)
            raise UserError(
                f"{SETTING} is {asked!r}, which cannot be read ({error}); expected auto, true, false{names}, or a file"
            ) from error
    elif several and "default" not in several:
        names = ", ".join(several)
        raise UserError(
            f"the tokenizer of {folder} has several chat templates and none is the default; set {SETTING} to one of "
            f"{names}, or to a file"
        )
    elif named:
        text, name = several["default"] if several else named, f"the chat template of {folder}"
    elif asked == "true":
        raise UserError(
            f"{SETTING} is true, but the tokenizer {folder!r} has no chat template; set it to false or to a file, or "
            "model.path to a model that was trained to chat"
        )
    else:
        return None
    made = ChatTemplate(text, name, {**tokenizer.special_tokens_map, **variables}, data.system_prompt, now)
    names = made._run([])[0] if variables else []
    for variable in variables:
        if variable not in names:
            has = did_you_mean(variable, names) or f" (it reads {', '.join(names)})"
            raise UserError(f"data.chat_template_kwargs has {variable!r}, which {name} does not read{has}")
    return made


# --- chats in data ----------------------------------------------------------------------------------------------------


def chat_of(value: Sequence[Any], column: str) -> tuple[Message, ...]:
    """A row's list of messages, their contents as text. Raises RowError for anything else."""
    chat = tuple(_message(one, f"{column}[{place}]") for place, one in enumerate(value))
    if not chat or chat[-1]["role"] not in ("user", "tool"):
        last = f"ends with a message of the role {chat[-1]['role']!r}" if chat else "has no messages"
        raise RowError(f'"{column}" {last}; expected the user\'s at the end, which the model answers')
    return chat


def _message(value: Any, name: str) -> Message:
    given = _given(value)
    if given.get("type") == "message":  # as OpenAI's Responses API has it, and NeMo-Gym
        del given["type"]
    if given.keys() != {"role", "content"}:
        raise RowError(f'"{name}" is {shown(value)}, expected a message: {{"role": "user", "content": "..."}}')
    content = given["content"]
    if isinstance(content, list):
        texts = []
        for place, value in enumerate(content):
            part, of_part = _given(value), f"{name}.content[{place}]"
            if part.keys() != {"type", "text"} or part["type"] not in ("text", "input_text"):
                raise RowError(f'"{of_part}" is {shown(value)}, expected a part {{"type": "text", "text": "..."}}')
            texts.append(text_of(part["text"], of_part, may_be_blank=True))
        content = "".join(texts)
    return {"role": text_of(given["role"], f"{name}.role"), "content": text_of(content, f"{name}.content")}


def _given(value: Any) -> dict[str, Any]:
    return {key: one for key, one in value.items() if one is not None} if isinstance(value, Mapping) else {}


def question_of(chat: Sequence[Message]) -> str:
    """What reports show: the user's message, or where there are several turns all of them."""
    turns = [message for message in chat if message["role"] != "system"]
    if len(turns) == 1:
        return turns[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in turns)
