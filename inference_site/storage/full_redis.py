"""Writes that a Redis which is full must not refuse, because running generations depend on them.

At ``maxmemory`` Redis refuses each command that may use memory, unless the same script has written
before it: a script is not stopped half-way. New requests are refused while there is still room
(``streams.room``), and the writes of this kind are small.
"""

from __future__ import annotations

FIRST_WRITE = 'redis.call("HDEL", "held", "")\n'
"""Opens a script whose writes are not refused. It changes nothing."""

SET_WHEN_FULL = FIRST_WRITE + 'redis.call("SET", KEYS[1], ARGV[1], "EX", ARGV[2])'
"""Script: set a key to a value for so many seconds."""
