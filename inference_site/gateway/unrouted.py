"""WebSockets to where there is none."""

from __future__ import annotations

from channels.generic.websocket import AsyncWebsocketConsumer


class UnroutedConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]  # Channels has no types.
    """Refuses the handshake."""

    async def connect(self) -> None:
        """Close before accepting, which is a 403."""
        await self.close()
