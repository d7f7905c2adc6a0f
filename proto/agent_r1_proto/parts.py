"""Parts of what enters a dialogue: text, and images by the hash of their bytes.

Messages of tasks, results of tools and replies of environments are made of them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field

from agent_r1_proto.messages import StrictMessage

MediaType = Literal["image/png", "image/jpeg", "image/webp"]


class TextPart(StrictMessage):
    """Text of a message."""

    type: Literal["text"] = "text"
    text: str


def _check_base64(data: str) -> str:
    try:
        base64.b64decode(data, validate=True)
    except binascii.Error as exc:
        raise ValueError(f"{data[:32]!r} is no base64 ({exc}); encode the image") from exc
    return data


class ImagePart(StrictMessage):
    """An image of a tool's result, as the tool sends it."""

    type: Literal["image"] = "image"
    media_type: MediaType
    data_base64: Annotated[str, AfterValidator(_check_base64)]


class StoredImage(StrictMessage):
    """An image of a message, by its content."""

    type: Literal["image"] = "image"
    media_type: MediaType
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of its bytes."""

    @classmethod
    def of(cls, image: ImagePart) -> StoredImage:
        """Return what names an image."""
        data = base64.b64decode(image.data_base64)
        return cls(media_type=image.media_type, sha256=hashlib.sha256(data).hexdigest())

    def __str__(self) -> str:
        """Name it for people."""
        return f"[{self.media_type} {self.sha256[:12]}]"


ResultPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]
"""Part of what a tool sends."""


def _stored(part: object) -> object:
    """Return a part that holds an image itself, as versions before 4.0 kept it, by its hash."""
    if isinstance(part, dict) and "data_base64" in part:
        part = ImagePart.model_validate(part)
    return StoredImage.of(part) if isinstance(part, ImagePart) else cast(object, part)


Part = Annotated[
    Annotated[TextPart | StoredImage, Field(discriminator="type")], BeforeValidator(_stored)
]
"""Part of a message."""
Content = str | Annotated[list[Part], Field(fail_fast=True)]
"""Content of a message: text, or parts."""


class ImageRefusedError(ValueError):
    """An image where only text can be read."""


def parts_of(content: str | Sequence[TextPart | StoredImage]) -> list[TextPart | StoredImage]:
    """Return what a message says, in parts."""
    return [TextPart(text=content)] if isinstance(content, str) else list(content)


def text_of(content: str | Sequence[TextPart | StoredImage]) -> str:
    """Return what a message says to a model that reads text: the one place that refuses images.

    Raises:
        ImageRefusedError: it holds an image.
    """
    for part in parts_of(content):
        if isinstance(part, StoredImage):
            raise ImageRefusedError(
                f"an image ({part.media_type}) cannot be shown to the policy, which reads text "
                "alone; send text in its place, such as a description"
            )
    return shown_text(content)


def with_images(shown: str, images: Iterable[StoredImage]) -> list[TextPart | StoredImage]:
    """Return the parts of which `shown_text`, perhaps cut at its end, returned a text.

    Args:
        shown: the text.
        images: those among the parts, in order.
    """
    parts: list[TextPart | StoredImage] = []
    for image in images:
        before, found, after = shown.partition(str(image))
        if not found:
            break
        parts += [TextPart(text=before.removesuffix("\n"))] if before else []
        parts.append(image)
        shown = after.removeprefix("\n")
    return [*parts, TextPart(text=shown)] if shown or not parts else parts


def shown_text(content: str | Iterable[TextPart | StoredImage]) -> str:
    """Return what a message says, for people: an image is named in brackets."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, TextPart) else str(part) for part in content)
