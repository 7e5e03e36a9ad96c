"""Images in chats, as in vLLM: each is a run of placeholder tokens, and processed images are cached.

An image is identified by its bytes or by the client's uuid. As in the real server, a uuid stands for the
first image sent with it, and a uuid alone brings that image back.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fake_engines.cache import Media

# Stands for an image in a chat's text; also the word of its placeholder token.
_WORD, _TOKEN = "<|endoftext|>", 0


class MissingImageError(Exception):
    """No image was sent with this uuid before."""


@dataclass(slots=True)
class Images:
    """A server's processed images, by identity."""

    held: dict[str, bytes] = field(default_factory=dict)

    def take(self, messages: Sequence[Any]) -> tuple[list[Any], list[str]]:
        """Messages with each image replaced by a word, and the images' identities.

        Raises:
            MissingImageError: only a uuid was sent, and no image has it.
        """
        found: list[str] = []
        return [self._message(message, found) for message in messages], found

    def lay_out(
        self, tokens: Sequence[int], identities: Sequence[str]
    ) -> tuple[list[int], tuple[Media, ...]]:
        """The prompt with each such token repeated to the image's length, and the images' positions."""
        if not identities:
            return list(tokens), ()
        laid: list[int] = []
        media: list[Media] = []
        left = iter(identities)
        for token in tokens:
            if token != _TOKEN:
                laid.append(token)
                continue
            identity = next(left)
            length = 20 + zlib.crc32(self.held[identity]) % 30
            media.append(Media(identity, len(laid), length))
            laid += [_TOKEN] * length
        return laid, tuple(media)

    def _message(self, message: Any, found: list[str]) -> Any:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            return message
        return message | {"content": [self._part(part, found) for part in content]}

    def _part(self, part: dict[str, Any], found: list[str]) -> dict[str, Any]:
        if "image_url" not in part:
            return part
        address = part["image_url"]
        address = address.get("url") if isinstance(address, dict) else address
        content = _bytes(address) if address else None
        identity = part.get("uuid")
        if identity is None:
            identity = hashlib.sha256(content or b"").hexdigest()
        if content is None and identity not in self.held:
            raise MissingImageError(f"Cache miss for image at index {len(found)} but data is not provided.")
        if content is not None:
            self.held.setdefault(identity, content)
        found.append(identity)
        return {"type": "text", "text": _WORD}


def _bytes(address: str) -> bytes:
    """An image's bytes; for a URL the URL itself, which the fake never fetches."""
    head, _, data = address.partition(",")
    return base64.b64decode(data) if head.startswith("data:") else address.encode()
