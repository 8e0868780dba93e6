"""Images of messages in the internal form: parts of the type "image", with a `url` (or data URL) and their `path`."""

from __future__ import annotations

import re
from typing import Any

from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.protocols.openai.messages import media_error

MAX_IMAGES = 100
DATA_URL = re.compile(r"data:(image/(?:png|jpeg|gif|webp));base64,([A-Za-z0-9+/]+={0,2})")


def image_parts(prompt: Any) -> list[dict[str, Any]]:
    """Return the images of a conversation."""
    messages = prompt if isinstance(prompt, list) else []
    parts = (part for message in messages if isinstance(message, dict) for part in message.get("parts", ()))
    return [part for part in parts if part["type"] == "image"]


def require_images(request: InferenceRequest, *, is_supported: bool, allow_urls: bool = False) -> None:
    """Check that the model takes the request's images, if there are any.

    Args:
        allow_urls: whether the provider may fetch an image. An internal one could be made to fetch internal URLs.

    Raises:
        ApiError: 400 that names the image.
    """
    images = image_parts(request.prompt)
    if images and not is_supported:
        raise media_error("images", images[0]["path"])
    if len(images) > MAX_IMAGES:
        raise invalid(images[MAX_IMAGES]["path"], f"A request may have at most {MAX_IMAGES} images.")
    for image in images:
        if DATA_URL.fullmatch(image["url"]):
            continue
        if not allow_urls or not image["url"].startswith("https://"):
            kind = "a base64 data URL of a PNG, JPEG, GIF or WebP image"
            wanted = f"an https URL or {kind}" if allow_urls else kind
            raise ApiError("invalid_value", f"The image must be {wanted}.", image["path"])


def has_images(request: InferenceRequest) -> bool:
    """Return whether a message of the request has an image."""
    return bool(request.analysis.images or (request.prompt_param == "messages" and image_parts(request.prompt)))
