"""Sans-I/O decoders for a streamed chat completion, as small as the measurement allows.

The load generator shares the processor with the server that it measures. So events are counted by
regular expressions on bytes, and no JSON is parsed. Quotes inside generated text are escaped on the
wire, so that the text cannot match.
"""

import re

CONTENT = re.compile(rb'"(?:reasoning_)?content":\s?"(?!")')
USAGE = re.compile(rb'"usage":\s?\{.*?"completion_tokens":\s?(\d+)', re.DOTALL)
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
LENGTH = re.compile(rb"\r\ncontent-length: ?(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding: ?chunked", re.IGNORECASE)


class ChunkedDecoder:
    """The chunked transfer coding (RFC 9112, section 7.1), without trailers."""

    def __init__(self) -> None:
        self.done = False
        self._buffer = b""

    def feed(self, data: bytes) -> bytes:
        """Return the content of the chunks that are complete by now.

        Raise ValueError if the bytes are not a chunked body.
        """
        buffer, parts, position = self._buffer + data, [], 0
        while not self.done and (line_end := buffer.find(b"\r\n", position)) >= 0:
            size = int(buffer[position:line_end].partition(b";")[0], 16)
            start, end = line_end + 2, line_end + 2 + size
            if size and len(buffer) < end + 2:
                break
            parts.append(buffer[start:end])
            position, self.done = end + 2, size == 0
        self._buffer = buffer[position:]
        return b"".join(parts)


class EventCounter:
    """Count the events of a chat completion stream that carry text, and find its usage."""

    def __init__(self) -> None:
        self.content_events = 0
        self.completion_tokens: int | None = None
        self.tail = b""

    def feed(self, body: bytes) -> None:
        """Take more of the body; events may be cut anywhere."""
        block, separator, self.tail = (self.tail + body).rpartition(b"\n\n")
        if not separator:
            return
        self.content_events += len(CONTENT.findall(block))
        if usage := USAGE.search(block):
            self.completion_tokens = int(usage[1])


class ReplyDecoder:
    """One HTTP/1.1 response: status, framing and, if it is a 200, the events of its body."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.done = False
        self.events = EventCounter()
        self.error_body = b""
        self._head = b""
        self._chunks: ChunkedDecoder | None = None
        self._bytes_left: int | None = None

    def feed(self, data: bytes) -> None:
        """Take more of the response. Raise ValueError if it is not HTTP/1.1."""
        if self.status is None:
            head, separator, data = (self._head + data).partition(b"\r\n\r\n")
            if not separator:
                self._head = head
                return
            self._read_head(head)
        self._read_body(data)

    def problem(self) -> str | None:
        """Return the error of the ended response, or None."""
        if self.status != 200:
            return f"status {self.status}: {self.error_body[:300].decode(errors='replace')}"
        if not self.events.completion_tokens:
            return f"no usage at the end: {self.events.tail[-300:].decode(errors='replace')}"
        return None

    def _read_head(self, head: bytes) -> None:
        status = STATUS.match(head)
        if status is None:
            raise ValueError(f"not an HTTP response: {head[:80]!r}")
        self.status = int(status[1])
        if CHUNKED.search(head):
            self._chunks = ChunkedDecoder()
        elif length := LENGTH.search(head):
            self._bytes_left = int(length[1])

    def _read_body(self, data: bytes) -> None:
        if self._chunks:
            data = self._chunks.feed(data)
            self.done = self._chunks.done
        elif self._bytes_left is not None:
            self._bytes_left -= len(data)
            self.done = self._bytes_left <= 0
        if self.status == 200:
            self.events.feed(data)
            if self.done:  # What is not streamed is one event, without its end.
                self.events.feed(b"\n\n")
        else:
            self.error_body += data
