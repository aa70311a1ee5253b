"""What an operator does to a generation: stop it, or let it go first."""

from __future__ import annotations

from inference_site.domain.errors import StoppedByOperator
from inference_site.generations.ending_without_worker import end_in_place
from inference_site.generations.kinds import kind_of
from inference_site.generations.models import TERMINAL, Generation, ServiceClass, Status
from inference_site.streams.event_log import request_cancel


def stop(generation: Generation) -> bool:
    """Have a generation stopped, whoever waits for it; return False when it has ended already.

    What waits ends now; what runs, within a tick of the publisher and a token of its engine. Raise
    redis' errors when Redis is down.
    """
    if generation.status in TERMINAL:
        return False
    if generation.status == Status.QUEUED and _stop_waiting(generation):
        return True
    request_cancel(generation.public_id)  # A worker has it, or takes it this moment.
    return True


def move_up(generation: Generation) -> bool:
    """Let one that waits go before all of its model that were not moved up.

    Return False if it waits no more, or was moved up already.
    """
    waiting = Generation.objects.filter(pk=generation.pk, status=Status.QUEUED)
    lower = waiting.exclude(service_class=ServiceClass.URGENT)
    return bool(lower.update(service_class=ServiceClass.URGENT))


def _stop_waiting(generation: Generation) -> bool:
    """Cancel it if nobody has claimed it; who listens is told why."""

    def cancel() -> bool:
        return Generation.objects.cancel_waiting(generation.public_id)

    tells_itself = kind_of(generation.kind).recover is not None
    error = None if tells_itself else StoppedByOperator()
    return end_in_place(generation, Status.CANCELLED, cancel, error)
