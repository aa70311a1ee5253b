"""Request bodies."""

from __future__ import annotations

from typing import IO, Any

import orjson
from rest_framework.parsers import BaseParser

from inference_site.http.errors import InvalidRequestError


class JsonParser(BaseParser):
    """JSON, and nothing else: another content type is a 415."""

    media_type = "application/json"

    def parse(self, stream: IO[bytes], media_type: Any = None, parser_context: Any = None) -> Any:
        """Return the decoded body. Raise InvalidRequestError when it is no JSON."""
        try:
            return orjson.loads(stream.read())
        except orjson.JSONDecodeError as exc:
            raise InvalidRequestError(
                f"We could not parse the JSON body of your request. (The parser said: {exc}.)"
            ) from exc
