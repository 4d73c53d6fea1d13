"""A server's API key: it is sent with requests, and appears in no message, log or file."""

from __future__ import annotations

import json
import os
import re
from urllib.parse import quote

from nemo_edo.errors import UserError

HIDDEN = "***"
SHORTEST_HIDDEN = 8
"""Characters. A shorter key is not hidden: it is no secret, and may be part of ordinary text."""


BREAK = r"(?:\s|\\[nrt])*"
"""White space, and how JSON writes it."""


class ApiKey:
    """Sent in each request's headers. Servers quote what they refuse, so all that comes from one goes through ``hide``
    before it is shown or kept."""

    def __init__(self, value: str | None) -> None:
        """value: None: the server asks for none."""
        self.value = value
        self.headers = {} if value is None else {"Authorization": f"Bearer {value}"}

    def __repr__(self) -> str:
        return f"ApiKey({None if self.value is None else HIDDEN})"

    def hide(self, text: str) -> str:
        """The text without the key, as it is and as JSON or a URL writes it, and broken over lines."""
        key = self.value or ""
        if len(key) >= SHORTEST_HIDDEN:
            for form in (json.dumps(key)[1:-1], quote(key, safe=""), key.replace("/", r"\/"), key):
                text = re.sub(BREAK.join(map(re.escape, form)), HIDDEN, text)
        return text


def key_of_environment(setting: str, variable: str | None) -> ApiKey:
    """The key in an environment variable; None: no key. setting: what names the variable. Raises UserError, which does
    not show the key, where there is none that a header can hold."""
    if variable is None:
        return ApiKey(None)
    value = os.environ.get(variable)
    if value is None:
        raise UserError(f"{setting} is {variable}, which is not set in the environment")
    if not value or not all("!" <= letter <= "~" for letter in value):
        raise UserError(
            f"{setting} is {variable}, which has {len(value)} characters in the environment; expected a key alone, of "
            "printable ASCII without white space or line ends"
        )
    return ApiKey(value)
