"""A server's API key: it is sent with requests, and appears in no message, log or file."""

from __future__ import annotations

import os
import re
from typing import AnyStr

from nemo_edo.errors import UserError

HIDDEN = "***"
SHORTEST = 8
"""Characters: a key is hidden wherever it occurs, and a shorter one may be part of ordinary text."""


class ApiKey:
    """Sent in each request's headers. Servers quote what they refuse, so all that comes from one goes through ``hide``
    before it is shown or kept."""

    def __init__(self, value: str | None) -> None:
        """value: None: the server asks for none."""
        self.value = value
        pattern = "".join(map(_written, value or ""))
        self._text, self._bytes = re.compile(pattern), re.compile(pattern.encode())

    def __repr__(self) -> str:
        return f"ApiKey({None if self.value is None else HIDDEN})"

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.value is None else {"Authorization": f"Bearer {self.value}"}

    def hide(self, said: AnyStr) -> AnyStr:
        """Texts or bytes without the key, however JSON or a URL writes it."""
        if not self.value:
            return said
        return self._text.sub(HIDDEN, said) if isinstance(said, str) else self._bytes.sub(HIDDEN.encode(), said)


def key_of_environment(setting: str, variable: str | None) -> ApiKey:
    """The key in an environment variable; None: no key. setting: what names the variable. Raises UserError, which does
    not show the key, where there is none that a header can hold."""
    if variable is None:
        return ApiKey(None)
    value = os.environ.get(variable)
    if value is None:
        raise UserError(f"{setting} is {variable}, which is not set in the environment")
    if not value:
        raise UserError(f"{setting} is {variable}, which is empty in the environment")
    if wrong := next((place for place, one in enumerate(value, 1) if not "!" <= one <= "~"), None):
        what = "white space" if value[wrong - 1].isspace() else "no printable ASCII character"
        raise UserError(
            f"{setting} is {variable}, whose character {wrong} of {len(value)} in the environment is {what}; expected "
            "the key alone, of printable ASCII characters without spaces and line breaks"
        )
    if len(value) < SHORTEST:
        raise UserError(
            f"{setting} is {variable}, which has {len(value)} characters in the environment; expected at least "
            f"{SHORTEST}: a shorter key is no secret, and hiding it would change ordinary text"
        )
    return ApiKey(value)


def _written(character: str) -> str:
    """The pattern of a character as text, JSON's two escapes, and a URL's."""
    plain, code = re.escape(character), ord(character)
    return rf"(?:{plain}|\\{plain}|\\u(?i:{code:04x})|%(?i:{code:02x}))"
