"""Channel layer messages that a script sends from within Redis, with what it has written.

Who follows a stream, only its log's server knows, so a message that the writer sends comes a round
trip later. How a message looks is channels_redis' own affair, and known here alone: it is published
under its channel's name, in msgpack.
"""

from __future__ import annotations

from django.conf import settings

SEND = """
local messages = {}
local function add_message(channel, stream, payload)
  local streams = messages[channel] or {}
  messages[channel] = streams
  streams[#streams + 1] = "\\146" .. cmsgpack.pack(stream) .. struct.pack(">BI4", 198, #payload)
  streams[#streams + 1] = payload
end
local function send_messages()
  for channel, streams in pairs(messages) do
    local head = "\\130" .. cmsgpack.pack("type", "stream.frames", "streams")
    local count = struct.pack(">BI4", 221, #streams / 2)
    redis.call("PUBLISH", channel, head .. count .. table.concat(streams))
  end
end
"""
"""Lua for ``event_log.channel_message``: arrays and byte strings with lengths of four bytes."""


def can_send(url: str) -> bool:
    """Whether the channel layer's messages go through this server, and through no other."""
    return [url] == settings.CHANNEL_LAYER_URLS
