"""Which turns a conversation that is too long for its model loses: the oldest, but no instructions.

The length of a turn is whatever the caller measures: characters, bytes or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from inference_site.domain.messages import Message


def without_oldest(
    messages: Sequence[Message], lengths: Sequence[float], too_many: float
) -> tuple[Message, ...]:
    """Return the messages without as many of the oldest turns as have this length together.

    At least one turn is dropped, if there is one before the last turn of the user, which always
    stays with all that follows it. Messages of the system stay too.
    """
    last_turn = max((i for i, m in enumerate(messages) if m.role == "user"), default=0)
    dropped: set[int] = set()
    dropped_length = 0.0
    for position in range(last_turn):
        message = messages[position]
        if message.role == "system":
            continue
        # A turn goes with all up to the next message of the user: templates insist that a
        # conversation begins with the user, and no result stays without its call.
        if message.role == "user" and dropped and dropped_length >= too_many:
            break
        dropped.add(position)
        dropped_length += lengths[position]
    return tuple(message for i, message in enumerate(messages) if i not in dropped)
