"""The images that a moderation model judges with the text of the new input.

They are fetched once, for the judgement and for the answer: a URL could give another image later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from inference_site.core.domain.request import GenerationRequest, ImagePart
from worker.media import resolve_media


def with_judged_images(
    request: GenerationRequest, tools: Sequence[Mapping[str, Any]], project_id: int
) -> tuple[GenerationRequest, Sequence[Mapping[str, Any]]]:
    """Return the request with the media of its judged messages resolved, and the options of its
    tools, those of the moderation with these images and their hash.

    Blocks while it fetches. Raise InvalidRequest (see ``resolve_media``).
    """
    newest = sum(options.get("judged_messages", 0) for options in tools)
    if not newest:
        return request, tools
    earlier, judged = request.messages[:-newest], request.messages[-newest:]
    judged = resolve_media(replace(request, messages=judged), project_id).messages
    parts = [part for message in judged if message.role != "system" for part in message.parts]
    images = [part for part in parts if isinstance(part, ImagePart)]
    found = {
        "images": images,
        "images_hash": hashlib.sha256("\n".join(one.url for one in images).encode()).hexdigest(),
    }
    return replace(request, messages=(*earlier, *judged)), [
        {**options, **found} if options.get("judged_messages") else options for options in tools
    ]
