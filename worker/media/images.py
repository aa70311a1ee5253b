"""Images as bytes: what they are, how large, and in a form that engines can read."""

from __future__ import annotations

import base64
import io

from PIL import Image

from worker.media.allowance import Allowance, MediaError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_READ_BY_ENGINES = ("PNG", "JPEG")


def image_url(content: bytes, allowance: Allowance) -> str:
    """Return the image as a ``data:`` URL, a PNG if it was neither that nor a JPEG.

    Of an animation it is the first frame. Raise MediaError for what is no image, or too large.
    """
    image = _opened(content)
    allowance.take_pixels(image.width * image.height)
    if image.format in _READ_BY_ENGINES:
        return _data_url(image.format, content)
    return _data_url("PNG", _as_png(image))


def _opened(content: bytes) -> Image.Image:
    """Read the header and no more."""
    try:
        return Image.open(io.BytesIO(content), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
        # Pillow has a limit of its own, far above ours.
        raise MediaError("The image has too many pixels.") from exc
    except Exception as exc:  # A reader of hostile files may raise anything.
        raise MediaError(
            "This is not an image that can be read; it must be PNG, JPEG, WebP, GIF or BMP."
        ) from exc


def _as_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    try:
        # Level 1: the file goes no further than this process.
        image.convert("RGB").save(file, "PNG", compress_level=1)
    except Exception as exc:  # As above.
        raise MediaError("The image is damaged.") from exc
    return file.getvalue()


def _data_url(format_: str, content: bytes) -> str:
    return f"data:image/{format_.lower()};base64,{base64.b64encode(content).decode()}"
