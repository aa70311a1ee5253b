"""Service tiers: which class of the queue a request gets for the tier that it asks for.

``flex`` waits behind all others. ``priority`` goes before them, for keys that have priority
requests left in the current minute; any other request for it is served as usual, and its answer
says so, as OpenAI's does. A response in the background waits in the background.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inference_site.accounts.keys import Caller
from inference_site.accounts.rate_limits import takes_priority
from inference_site.runs.models import ServiceClass

TierName = Literal["default", "flex", "priority"]


@dataclass(frozen=True, slots=True)
class ServiceTier:
    """The tier that a request is served with, as its answer says, and its class in the queue."""

    name: TierName
    service_class: ServiceClass


def service_tier(caller: Caller, asked: str | None, *, background: bool = False) -> ServiceTier:
    """Return the tier for a request; one with priority is counted for its key."""
    if asked == "flex":
        return ServiceTier("flex", ServiceClass.BACKGROUND)
    if background:
        return ServiceTier("default", ServiceClass.BACKGROUND)
    if asked in ("priority", "fast") and takes_priority(caller):
        return ServiceTier("priority", ServiceClass.PRIORITY)
    return ServiceTier("default", ServiceClass.FOREGROUND)
