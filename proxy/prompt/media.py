"""Finds images, audio and video in requests, and guards the `uuid` that a client may give one.

An engine identifies an item by its content, or by the client's `uuid`. It trusts the uuid: a second item
under the same uuid gets the first one's KV, and a uuid without content means the last item that any client
sent under it, whatever its salt. So kvpin accepts a uuid for its first content only, and makes it unique to
its salt.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from engine_adapter import JsonBody
from engine_adapter.off_loop import JSON_BYTES_PER_MS, off_loop
from engine_adapter.prompt.forms import not_plain
from proxy.errors import BadRequest

# The field of a part that holds an item → its kind, in chats, Responses and Messages. The field decides, not
# the part's type: some engines read a `text` part with an image_url as an image.
_KINDS = {
    "image_url": "image", "image_embeds": "image", "image_pil": "image", "source": "image",
    "input_audio": "audio", "audio_url": "audio", "audio_embeds": "audio", "video_url": "video",
    "video_embeds": "video", "file": "file", "file_id": "file", "file_url": "file", "file_data": "file",
    "prompt_embeds": "embeddings",
}  # fmt: skip
# If a part has several of these fields, the first one counts.
_RANK = {key: rank for rank, key in enumerate(_KINDS)}
MOST_MEDIA = 4096
"""The most images, audio, video and embeddings of one request."""
# Request fields that hold parts, and the fields within them that do.
_FIELDS = ("messages", "input", "query", "queries", "documents", "data_1", "data_2", "text_1", "text_2")
_BESIDE_MESSAGES = frozenset(_FIELDS[1:])
_WITHIN = ("content", "output")
# Decoding and hashing this many bytes takes about 1 ms; more is done in a thread.
_BYTES_PER_MS = 500_000
_UUIDS = 100_000
_DROPPED = 16  # the part of a full table that is dropped at once
_DIGEST_BYTES = 16


# Bytes of a body in which the worst nesting takes 1 ms to look through.
_NESTED_BYTES_PER_MS = 8 * 1024
# Lists and objects within each other that media are looked for in: chats in a batch take six.
MOST_NESTED = 12
# An index or a name, the path before it, and the length of that.
_Path = tuple[int | str, "_Path | None", int]


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image, audio or video as it stands in a request.

    Attributes:
        param: the field it is, e.g. `messages[0].content[1]`.
        kind: `image`, `audio`, `video`, `file` or `embeddings`.
        item: what it holds: an address, a `data:` address, or an object of the engine's.
    """

    param: str
    kind: str
    fields: dict[str, Any] = field(repr=False)
    item: object = field(repr=False)

    @property
    def uuid(self) -> str | None:
        """The client's name for it. Raises BadRequest when it is not a string."""
        uuid = self.fields.get("uuid")
        if uuid is not None and not isinstance(uuid, str):
            raise BadRequest(f"{self.param}.uuid must be a string", param=f"{self.param}.uuid")
        return uuid

    @property
    def is_elsewhere(self) -> bool:
        """True if the request holds only its address; the content there may change."""
        return isinstance(self.item, str) and self.item[:5].lower() != "data:"

    @property
    def is_lasting(self) -> bool:
        """True if its identity never changes: the request holds its content, or a uuid for it. False for
        embeddings, which engines do not identify."""
        return self.kind != "embeddings" and (not self.is_elsewhere or self.uuid is not None)

    def digest(self) -> bytes | None:
        """A digest of its content; None for content that the request does not hold."""
        if self.item is None or self.is_elsewhere:
            return None
        content = (
            _decoded(self.item)
            if isinstance(self.item, str)
            else msgspec.json.encode(self.item, order="sorted")
        )
        return _digest(self.kind.encode(), content)


def is_text(part: object) -> bool:
    """True if a part of a message is text to every engine."""
    return isinstance(part, dict) and part.get("type") == "text" and _KINDS.keys().isdisjoint(part)


def find_media(values: dict[str, Any]) -> list[MediaPart]:
    """The images, audio and video in decoded fields of a request, in their order. Raises BadRequest: there
    are more than `MOST_MEDIA`."""
    parts = (part for name, value in values.items() for part in _parts(value, name))
    found = list(islice(parts, MOST_MEDIA + 1))
    check_number(len(found), next(iter(values), None))
    return found


def check_number(media: int, param: str | None) -> None:
    """Raises BadRequest for more images, audio, video and embeddings than are read in time."""
    if media > MOST_MEDIA:
        raise BadRequest(
            f"a request may hold {MOST_MEDIA} images, audio, video and embeddings; this one holds more",
            param=param,
        )


def texts_only(messages: object, text: str) -> list[Any] | None:
    """A chat's messages, with `text` as the content of each one that is not all text; None where they cannot
    be read."""
    if not isinstance(messages, list) or not messages:
        return None
    return [message if is_text_message(message) else {**message, "content": text} for message in messages]


def is_text_message(message: object) -> bool:
    """True if all of a message is text, as far as can be read."""
    content = message.get("content") if isinstance(message, dict) else None
    return not isinstance(content, list) or all(map(is_text, content))


def media_fields(body: JsonBody) -> dict[str, Any]:
    """The fields of a request that may hold media, decoded."""
    return {name: body.get(name) for name in _FIELDS if name in body}


def _parts(value: object, param: str) -> Iterator[MediaPart]:
    """Looks without recursion, in the order of the request: most of what it looks at holds nothing. Raises
    BadRequest: a part may lie deeper than engines look."""
    waiting: list[tuple[object, _Path]] = [(value, (param, None, 0))]
    while waiting:
        each, path = waiting.pop()
        if path[2] > MOST_NESTED:
            raise BadRequest(f"{param} is nested more than {MOST_NESTED} deep", param=param)
        inner: list[tuple[object, _Path]] = []
        if isinstance(each, list):  # a batch of chats is a list of lists
            deeper = path[2] + 1
            inner = [
                (item, (index, path, deeper))
                for index, item in enumerate(each)
                if isinstance(item, (dict, list))
            ]
        elif isinstance(each, dict):
            kind = each.get("type")
            keys = each.keys() & _KINDS.keys() or (
                {kind} if isinstance(kind, str) and kind in _KINDS else set()
            )
            if keys:
                key = min(keys, key=_RANK.__getitem__)
                yield MediaPart(_name_of(path), _KINDS[key], each, _item(key, each.get(key)))
            inner = [(each[name], (name, path, path[2] + 1)) for name in _WITHIN if name in each]
        inner.reverse()
        waiting += inner


def _name_of(path: _Path) -> str:
    """The path as an error names it, e.g. `messages[0].content`."""
    names: list[str] = []
    step: _Path | None = path
    while step is not None:
        at, step, _ = step
        names.append(f"[{at}]" if isinstance(at, int) else f".{at}")
    return "".join(reversed(names)).removeprefix(".")


def _item(key: str, value: object) -> object:
    """The item in a part's field: an address, perhaps wrapped or missing, or an object."""
    if isinstance(value, dict) and (not value or "url" in value):
        return value.get("url")
    return {key: value} if isinstance(value, str) and key.endswith(("_embeds", "_data")) else value


def _decoded(address: str) -> bytes:
    """The bytes of a `data:` address; those of the address itself where it cannot be decoded."""
    head, _, data = address.partition(",")
    if head.endswith(";base64"):
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            pass
    return address.encode(errors="surrogatepass")


def _digest(*pieces: bytes) -> bytes:
    """A digest of length-framed pieces."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"kvpin media")
    for piece in pieces:
        state.update(len(piece).to_bytes(8, "little"))
        state.update(piece)
    return state.digest()


class MediaUuids:
    """Remembers the first content of each client uuid. Bounded: of the tenant that has the most, the least
    recently used are dropped. So no tenant can push out another's, under which other content would then be
    accepted."""

    def __init__(self, *, trusted: bool = False, limit: int = _UUIDS) -> None:
        """`trusted`: clients may reuse a uuid; otherwise its first content is the only one."""
        self._trusted = trusted
        self._limit = limit
        self._seen = defaultdict[str | None, OrderedDict[bytes, bytes]](OrderedDict)  # by tenant of the salt
        self._count = 0

    async def admit(self, body: JsonBody, salt: str | None, tenant: str | None = None) -> JsonBody:
        """A request as it may go to engines: under a salt, its uuids are unique to the salt. `tenant`: whose
        salt it is; None for a salt of no tenant. Raises BadRequest: a uuid has other content already, or is
        not a string; or there are too many items."""
        if body.is_plain:
            return body
        # JSON may write any letter as \u00xx.
        size = len(body.raw)
        may_hold = await off_loop(partial(_may_hold_media, body), ms=size / JSON_BYTES_PER_MS)
        if not may_hold or not (b"uuid" in body.raw or b"\\u00" in body.raw):
            return body

        def look() -> tuple[dict[str, Any], list[MediaPart]]:
            values = media_fields(body)
            return values, [part for part in find_media(values) if part.uuid is not None]

        values, parts = await off_loop(look, ms=size / _NESTED_BYTES_PER_MS, what="media")
        if not parts:
            return body
        if not self._trusted:
            await self._check(size, parts, salt, tenant)
        if salt is None:
            return body
        for part in parts:
            part.fields["uuid"] = f"kvpin-{_name(part, salt).hex()}"
        return body.replace(**values)

    async def _check(
        self, size: int, parts: Sequence[MediaPart], salt: str | None, tenant: str | None
    ) -> None:
        """Refuses a uuid with new content. Requests that an engine refused count: it may hold the item."""
        digests = await off_loop(
            lambda: [part.digest() for part in parts], ms=size / _BYTES_PER_MS, what="media"
        )
        for part, digest in zip(parts, digests, strict=True):
            if digest is None:
                continue
            name, seen = _name(part, salt), self._seen[tenant]
            self._count += name not in seen
            if seen.setdefault(name, digest) != digest:
                raise BadRequest(
                    f"{part.param}.uuid came with other content before: give each {part.kind} one of its own",
                    param=f"{part.param}.uuid",
                )
            seen.move_to_end(name)
            if self._count > self._limit:
                # Several at once: the search for the tenant that has the most takes time.
                most = max(self._seen.values(), key=len)
                for _ in range(max(len(most) // _DROPPED, 1)):
                    most.popitem(last=False)
                    self._count -= 1


def _may_hold_media(body: JsonBody) -> bool:
    """True if a request has more than plain messages. They are decoded here, which is faster than a search
    for a word in their bytes, and which the prompt needs anyway."""
    if body.has_any(_BESIDE_MESSAGES):
        return True
    try:
        messages = body.view("messages")
        return not (messages is None or isinstance(messages, list)) or bool(not_plain(body))
    except msgspec.DecodeError:
        return True


def _name(part: MediaPart, salt: str | None) -> bytes:
    """The digest of a uuid and its salt; having no salt differs from every salt."""
    salted = (b"",) if salt is None else (b"salt", salt.encode(errors="surrogatepass"))
    return _digest(*salted, (part.uuid or "").encode(errors="surrogatepass"))
