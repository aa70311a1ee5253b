"""Daphne with an application of three lines: the lower bound of the cost of a refusal.

``python -m benchmarks.bare_server PORT``.
"""

import sys
from typing import Any

from daphne.cli import CommandLineInterface

_BODY = b'{"error":{"message":"x","type":"server_error","param":null,"code":"queue_full"}}'


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer every request with a 503."""
    del scope, receive
    await send({"type": "http.response.start", "status": 503, "headers": [_LENGTH]})
    await send({"type": "http.response.body", "body": _BODY})


_LENGTH = (b"content-length", str(len(_BODY)).encode())

if __name__ == "__main__":
    endpoint = f"tcp:port={sys.argv[1]}:interface=127.0.0.1:backlog=4096"
    arguments = ["-e", endpoint, "-v", "0", "--no-server-name"]
    CommandLineInterface().run([*arguments, "benchmarks.bare_server:application"])
