"""The one private method of aiohttp that the project calls.

``StreamReader.read_nowait`` raises the error of a broken connection, and never returns the bytes
that came before it. They may hold the end of the answer.
"""

import aiohttp


def received_bytes(content: aiohttp.StreamReader) -> bytes:
    """Return the bytes that have come and were not read, also of a broken connection."""
    return content._read_nowait(-1)  # There is no public way (see above).
