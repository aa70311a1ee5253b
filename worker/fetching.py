"""Files of the web that a request or a model names, fetched from checked hosts in limited time.

Redirects are followed by hand, so each URL on the way is checked like the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpcore
import httpx

from inference_site.core.checked_connections import (
    NoAnswer,
    NoPublicAddress,
    SecondsLeft,
    checked_pool,
    target_of,
)
from inference_site.core.domain.addresses import is_listed

MAX_REDIRECTS = 3
_REDIRECTS = {301, 302, 303, 307, 308}
_FAILURES = (
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.ProxyError,
    httpcore.UnsupportedProtocol,
)


class FetchError(Exception):
    """A URL cannot or must not be fetched. The message says nothing about the network."""


class FetchTimedOut(FetchError):
    """The host was too slow."""


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """What may be fetched.

    ``noun`` names the file in messages. ``allowed_hosts`` (see ``is_listed``) are the only hosts,
    if there are any. ``schemes`` are those that the error for another scheme names. ``headers`` go
    with every request; with headers that hold a secret, ``max_redirects`` is 0, because other
    hosts must not get it.
    """

    noun: str
    accept: bytes
    allow_private: bool
    allowed_hosts: Sequence[str] = ()
    schemes: Sequence[str] = ("http://", "https://")
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    max_redirects: int = MAX_REDIRECTS

    def checked_url(self, url: str) -> httpx.URL:
        """Return the parsed URL. Raise FetchError if it must not be fetched."""
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as exc:
            raise FetchError(f"The {self.noun}'s URL is not valid.") from exc
        if parsed.scheme not in ("http", "https"):
            known = " or ".join((", ".join(self.schemes[:-1]), self.schemes[-1]))
            raise FetchError(f"The {self.noun}'s URL must begin with {known}.")
        if parsed.userinfo:
            raise FetchError(f"The {self.noun}'s URL must hold no user name or password.")
        if not parsed.host or not 0 < (parsed.port or 80) < 65536:
            raise FetchError(f"The {self.noun}'s URL is not valid.")
        if self.allowed_hosts and not is_listed(parsed.host, self.allowed_hosts):
            raise FetchError(f"{self.noun.capitalize()}s are not fetched from this host here.")
        return parsed


@dataclass(frozen=True, slots=True)
class Fetched:
    """The answer of a host with status 200. ``headers`` have names in lower case.

    Reading ``chunks`` may raise what ``fetched`` raises.
    """

    url: httpx.URL
    headers: Mapping[bytes, bytes]
    chunks: Iterator[bytes]

    @property
    def announced_bytes(self) -> int:
        """The size of the content as the host gives it; 0 if it gives none."""
        length = self.headers.get(b"content-length", b"")
        return int(length) if length.isdigit() else 0


@contextmanager
def fetched(url: str, policy: FetchPolicy, seconds_left: SecondsLeft) -> Iterator[Fetched]:
    """Open the URL; the content is read from the answer within the ``with`` statement.

    Raise FetchError if the URL cannot or must not be fetched, also while the content is read, and
    what ``seconds_left`` raises.
    """
    noun, address = policy.noun, policy.checked_url(url)
    try:
        with checked_pool(seconds_left, allow_private=policy.allow_private) as pool:
            for _ in range(policy.max_redirects + 1):
                headers_sent = [
                    (b"Host", address.netloc),
                    (b"User-Agent", b"inference-site"),
                    (b"Accept", policy.accept),
                    (b"Accept-Encoding", b"identity"),  # Size limits count received bytes.
                    *policy.headers.items(),
                ]
                with pool.stream("GET", target_of(address), headers=headers_sent) as response:
                    headers = {name.lower(): value for name, value in response.headers}
                    if response.status not in _REDIRECTS or b"location" not in headers:
                        if response.status != 200:
                            raise FetchError(
                                f"The {noun} could not be fetched: HTTP status {response.status}."
                            )
                        yield Fetched(address, headers, response.iter_stream())
                        return
                    location = headers[b"location"].decode("latin-1")
                    try:
                        address = policy.checked_url(str(address.join(location)))
                    except httpx.InvalidURL as exc:
                        raise FetchError(f"The {noun}'s host redirects to no valid URL.") from exc
    except NoPublicAddress as exc:
        raise FetchError(f"The host of the {noun} has no public address.") from exc
    except NoAnswer as exc:
        raise FetchError(f"The {noun} could not be fetched: its host does not answer.") from exc
    except httpcore.TimeoutException as exc:
        raise FetchTimedOut(f"The {noun} could not be fetched in time.") from exc
    except _FAILURES as exc:
        raise FetchError(
            f"The {noun} could not be fetched: its host closed the connection."
        ) from exc
    raise FetchError(f"The {noun} is behind more than {policy.max_redirects} redirects.")
