"""A server's API key: it is sent with requests, and appears in no message, log or file."""

from __future__ import annotations

import json
import os
from urllib.parse import quote

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
        forms = {value, json.dumps(value)[1:-1], quote(value, safe=""), value.replace("/", r"\/")} if value else set()
        self._forms = sorted(forms, key=len, reverse=True)

    def __repr__(self) -> str:
        return f"ApiKey({None if self.value is None else HIDDEN})"

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.value is None else {"Authorization": f"Bearer {self.value}"}

    def hide(self, text: str) -> str:
        """The text without the key, as it is and as JSON or a URL writes it."""
        for form in self._forms:
            text = text.replace(form, HIDDEN)
        return text


def key_of_environment(setting: str, variable: str | None) -> ApiKey:
    """The key in an environment variable; None: no key. setting: what names the variable. Raises UserError, which does
    not show the key, where there is none that a header can hold."""
    if variable is None:
        return ApiKey(None)
    value = os.environ.get(variable)
    if value is None:
        raise UserError(f"{setting} is {variable}, which is not set in the environment")
    wrong = next((place for place, one in enumerate(value, 1) if not "!" <= one <= "~"), None)
    if wrong is not None:
        raise UserError(
            f"{setting} is {variable}, whose character {wrong} of {len(value)} in the environment is white space or "
            "not printable ASCII; expected the key alone"
        )
    if len(value) < SHORTEST:
        raise UserError(
            f"{setting} is {variable}, which has {len(value)} characters in the environment; expected at least "
            f"{SHORTEST}: a shorter key is no secret, and hiding it would change ordinary text"
        )
    return ApiKey(value)
