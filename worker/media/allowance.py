"""What all images of one request may take together, and the error for what is refused.

A limit for each image alone would be none: a request may name a thousand of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from django.conf import settings

_IMAGES = 4
"""How many images of the largest size one request may have; smaller ones may be more."""


class MediaError(Exception):
    """An image cannot be used. The message is for the client: it says nothing of the network."""


@dataclass
class Allowance:
    """What is left for the rest of a request. ``deadline`` is of the monotonic clock."""

    size_bytes: int
    pixels: int
    deadline: float

    @classmethod
    def full(cls) -> Allowance:
        """Return what a request begins with, from the settings."""
        return cls(
            settings.MEDIA_MAX_BYTES,
            settings.MEDIA_MAX_PIXELS * _IMAGES,
            time.monotonic() + settings.MEDIA_TIMEOUT_S,
        )

    def seconds_left(self) -> float:
        """Return the time for all that is still to be fetched. Raise MediaError if it is over."""
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise time_is_up()
        return seconds

    def check_bytes(self, size_bytes: int) -> None:
        """Raise MediaError if an image of this size is more than is left."""
        if size_bytes > self.size_bytes:
            raise MediaError(
                "The images of a request may have at most "
                f"{settings.MEDIA_MAX_BYTES} bytes, all together."
            )

    def take_bytes(self, size_bytes: int) -> None:
        """Use some up. Raise MediaError if they are more than is left."""
        self.check_bytes(size_bytes)
        self.size_bytes -= size_bytes

    def take_pixels(self, pixels: int) -> None:
        """Use the pixels of an image up. Raise MediaError if it has too many."""
        limit = settings.MEDIA_MAX_PIXELS
        if pixels > limit:
            raise MediaError(f"The image has {pixels} pixels; at most {limit} are allowed.")
        if pixels > self.pixels:
            raise MediaError(
                f"The images of a request may have at most {_IMAGES * limit} pixels, all together."
            )
        self.pixels -= pixels


def time_is_up() -> MediaError:
    """Return the error of a fetch that took too long."""
    return MediaError(f"The image could not be fetched within {settings.MEDIA_TIMEOUT_S} s.")
