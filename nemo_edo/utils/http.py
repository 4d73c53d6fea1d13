"""JSON over HTTP, with one client (aiohttp), one policy of retries, and keys that appear in no message, log or file.
httpx (0.28) scans its connection pool at the start and end of each request, which keeps a core busy, and answers
waiting, at a few hundred requests in flight."""

import asyncio
import json
import os
import re
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from nemo_edo.errors import UserError

HIDDEN = "***"
SHORTEST_HIDDEN = 8  # Characters. A shorter key is not hidden: it is no secret, and may be part of ordinary text.
BREAK = r"(?:\s|\\[nrt])*"  # white space, and how JSON writes it
RETRIABLE = (408, 425, 429)  # statuses below 500 after which the same request may succeed
SHOWN_CHARACTERS = 500  # characters of an answer's body that messages show
KEEPALIVE_S = 2.0  # for idle connections: uvicorn closes them after 5 s, perhaps just as a request is sent


class ServerError(UserError):
    """A server cannot be used, or has refused a request for good; names server, request and reason."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """status: of the answer that refused the request."""
        super().__init__(message)
        self.status = status


class NoAnswer(ServerError):
    """A server gave no usable answer; asking again may help."""


class Fault(Exception):
    """A request got no usable answer, but a retry may succeed; says what came instead."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        """retry_after_s: seconds for which the server asks for no requests."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TimeLimit(Fault):
    """No answer came in time."""


@dataclass(frozen=True)
class ApiKey:
    """Sent in each request's headers. Servers quote what they refuse, so all that comes from one goes through ``hide``
    before it is shown or kept."""

    value: str | None = field(repr=False)  # None: the server asks for none

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.value is None else {"Authorization": f"Bearer {self.value}"}

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


def retrying(attempts: int, backoff_s: float, backoff_limit_s: float) -> AsyncRetrying:
    """Calls again after a Fault; the longest wait doubles with each attempt. Raises the last Fault."""
    wait = wait_random_exponential(multiplier=backoff_s, max=backoff_limit_s)
    stop = stop_after_attempt(attempts)
    return AsyncRetrying(retry=retry_if_exception_type(Fault), wait=wait, stop=stop, reraise=True)


def open_session(key: ApiKey) -> aiohttp.ClientSession:
    """A session without limits of connections and time."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=connector, headers=key.headers, timeout=timeout)


def proxy_for(url: str) -> tuple[str, str] | None:
    """The environment variable that names the URL's proxy, and the proxy's URL; None: there is none, as for loopback
    addresses always. Raises ServerError for a proxy that cannot be used. aiohttp's own reading (``trust_env``) sends
    requests to loopback through the proxy, too, and has no message for values that it cannot use."""
    parts = urlsplit(url)
    host, known = parts.hostname or "", getproxies_environment()
    excepted = (one.strip().strip("[]") for one in known.get("no", "").split(","))
    direct = _is_loopback(host) or any(host == one or _is_in(host, one) for one in excepted)
    if direct or proxy_bypass_environment(host, known) or parts.scheme not in known:
        return None
    name, text = f"{parts.scheme}_proxy", known[parts.scheme]
    text = text if "://" in text else f"http://{text}"
    try:
        proxy = urlsplit(text)
        fits = proxy.scheme in ("http", "https") and bool(proxy.hostname) and proxy.port != 0
    except ValueError:
        fits = False
    if not fits:
        raise ServerError(
            f"{name} is {_without_password(text)}, which {url} would be asked through: expected an HTTP proxy, "
            f"http://HOST:PORT (SOCKS is not supported), or {host} in no_proxy"
        )
    return name, text


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
        return address.is_loopback or address.is_unspecified  # 0.0.0.0, as servers print where they listen
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _is_in(host: str, network: str) -> bool:
    """Whether the host is an address of the network, such as 10.0.0.0/8."""
    try:
        return "/" in network and ip_address(host) in ip_network(network, strict=False)
    except ValueError:
        return False


def _without_password(url: str) -> str:
    return re.sub(r"(?<=//)[^/]*@", "", url)


async def exchange(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    key: ApiKey,
    *,
    server: str,
    limit_s: float,
    body: Any = None,
    params: Mapping[str, Any] | None = None,
    answers_json: bool = True,
    is_own: bool = False,
) -> Any:
    """The value of the answer's JSON; None where it is empty, or not wanted (``answers_json``). server: for messages.
    limit_s: until the whole answer is here. is_own: the server is the run's, to which no proxy of the environment
    leads. Raises Fault where a retry may succeed, otherwise ServerError. Neither shows the key."""
    asked, proxy = f"{method} {urlsplit(url).path}", None
    if not is_own and (named := proxy_for(url)) is not None:
        name, proxy = named
        asked += f" through {name}={_without_password(proxy)}"
    try:
        async with asyncio.timeout(limit_s):
            # A redirect would send the key elsewhere.
            async with session.request(
                method, url, json=body, params=params, allow_redirects=False, proxy=proxy
            ) as response:
                text = key.hide((await response.read()).decode(errors="replace"))
    except TimeoutError:
        raise TimeLimit(f"{asked}: no answer within {limit_s:g} s") from None
    except aiohttp.ClientError as error:  # some have no message
        raise Fault(key.hide(f"{asked}: {type(error).__name__}: {error}".removesuffix(": "))) from None
    line = " ".join(text.split())
    shown = line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."
    if response.status >= 500 or response.status in RETRIABLE:
        retry_after_s = _retry_after(response.headers.get("retry-after", ""))
        raise Fault(f"{asked}: status {response.status}: {shown}", retry_after_s)
    if not 200 <= response.status < 300:
        raise ServerError(f"{server}: {asked}: status {response.status}: {shown}", response.status)
    if not text or not answers_json:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Fault(f"{asked}: not JSON: {shown}") from None


def run_tasks(work: Coroutine[Any, Any, None]) -> None:
    """``asyncio.run``; of the errors of its task groups, the first is raised as it is."""
    try:
        asyncio.run(work)
    except Exception as error:
        while hasattr(error, "exceptions"):  # a group, which the linter does not know: the functions run on Python 3.10
            error = error.exceptions[0]
        raise error from None


def _retry_after(value: str) -> float:
    """Seconds, from a number or a date (RFC 9110, 10.2.3); 0 where the header is absent or neither."""
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
