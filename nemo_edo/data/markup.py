"""Token ids of texts that hold a user's text: special tokens in that stay text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING

from nemo_edo.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_OURS, _USERS = 0x100000, 0x108000
"""The first of the private characters that stand for markup that is meant, and for text that looks like it."""
_PRIVATE, _USERS_PRIVATE = (re.compile(f"[{chr(first)}-{chr(0x10FFFF)}]") for first in (_OURS, _USERS))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The special tokens and their ids, but for white space, which some models have among them."""
    added = {token.content: one for one, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {text: one for text, one in added.items() if text.strip()}


class Markup:
    """Marks what a user wrote (``text``), and encodes what is made of it.

    Markup are the tokenizer's special tokens except for ``kept``, and its other added tokens that are in ``template``
    (some models have ``<|user|>`` among those).
    """

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

    def plain(self, text: str) -> str:
        """What a person reads of such a text."""
        return _USERS_PRIVATE.sub(lambda match: self._tokens[ord(match[0]) - _USERS], text)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of a text with users' parts. special: with what the tokenizer puts around texts.

        Raises UserError for a tokenizer that cannot write a special token as text.
        """
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
