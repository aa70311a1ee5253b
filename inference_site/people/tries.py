"""How often something may be tried. Redis counts, for all web processes.

An address may try ``OF_ADDRESS`` passwords a minute, whatever the user names: passwords are slow to
check by design. A user name may be tried ``OF_NAME`` times an hour from browsers in which its user
has never logged in, whatever the addresses. Browsers that know the user (a signed cookie) are not
counted, so whoever spends the tries of a name does not lock its user out of them.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from redis.exceptions import RedisError

from inference_site.people.addresses import client_address
from inference_site.storage.redis import site_client

logger = logging.getLogger(__name__)

_COUNT = """
local tries = redis.call('INCR', KEYS[1])
if tries == 1 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
return {tries, redis.call('TTL', KEYS[1])}
"""
_COOKIE, _SALT, _YEAR_S = "known_browser", "known browser", 365 * 86_400


@dataclass(frozen=True, slots=True)
class Limit:
    """So many tries in so many seconds, from the first of them on."""

    name: str
    most: int
    window_s: int

    def seconds_to_wait(self, who: str | None) -> int:
        """Count a try; return how long no more is taken, or 0. While Redis is away, 0."""
        try:
            counted: Any = site_client().eval(_COUNT, 1, f"{self.name}:{who}", self.window_s)
        except RedisError as exc:
            logger.warning("a try is not counted: %s", exc)
            return 0
        tries, left_s = map(int, counted)
        return max(1, left_s) if tries > self.most else 0

    def forget(self, who: str) -> None:
        """Begin to count anew."""
        try:
            site_client().delete(f"{self.name}:{who}")
        except RedisError as exc:
            logger.warning("tries are not forgotten: %s", exc)


OF_ADDRESS = Limit("logins", 30, 60)
OF_NAME = Limit("logins-of", 50, 3_600)
RESETS_OF_ADDRESS = Limit("resets", 10, 600)
RESETS_OF_USER = Limit("resets-of", 3, 3_600)


def of_address(request: HttpRequest, limit: Limit = OF_ADDRESS) -> int:
    """Count a try of the request's address; return how many seconds it must wait, or 0."""
    return limit.seconds_to_wait(client_address(request))


def of_name(request: HttpRequest, username: str) -> int:
    """Count a try of this user name, unless its user has logged in in this browser before."""
    known = request.get_signed_cookie(_COOKIE, default="", salt=_SALT, max_age=_YEAR_S)
    return 0 if known == _digest(username) else OF_NAME.seconds_to_wait(_digest(username))


def remember_browser(request: HttpRequest, response: HttpResponse) -> None:
    """Have the browser show from now on that the user who is logged in uses it."""
    if not request.user.is_authenticated:
        return
    name = _digest(request.user.get_username())
    OF_NAME.forget(name)
    response.set_signed_cookie(
        _COOKIE,
        name,
        salt=_SALT,
        max_age=_YEAR_S,
        path="/admin/",
        secure=settings.SESSION_COOKIE_SECURE,
        httponly=True,
        samesite="Lax",
    )


def _digest(username: str) -> str:
    return hashlib.sha256(username.encode(errors="replace")).hexdigest()[:32]
