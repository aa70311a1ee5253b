"""What an operator does to a generation: stop it, or let it go first."""

from __future__ import annotations

from inference_site.domain.errors import StoppedByOperator
from inference_site.generations.cancel import cancel
from inference_site.generations.models import TERMINAL, Generation, ServiceClass, Status


def stop(generation: Generation) -> bool:
    """Have a generation stopped, whoever waits for it; return False when it has ended already.

    What waits ends now; what runs, within a tick of the publisher and a token of its engine. Raise
    redis' errors when Redis is down.
    """
    if generation.status in TERMINAL:
        return False
    cancel([generation.public_id], StoppedByOperator())
    return True


def move_up(generation: Generation) -> bool:
    """Let one that waits go before all of its model that were not moved up.

    Return False if it waits no more, or was moved up already.
    """
    waiting = Generation.objects.filter(pk=generation.pk, status=Status.QUEUED)
    lower = waiting.exclude(service_class=ServiceClass.URGENT)
    return bool(lower.update(service_class=ServiceClass.URGENT))
