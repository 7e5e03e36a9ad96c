"""Reads cached tokens from SGLang's answers: from `meta_info` of `/generate`, and from the `sglext` field of
the OpenAI routes, for servers whose usage does not report them.

SGLang sends `sglext` on request, and only if the prompt reused something. In a stream it is a chunk of its
own before the usage. If the client did not ask for it, it is removed. Its count is copied into the usage.
"""

from __future__ import annotations

import re

import msgspec

from engine_adapter.body import UNREADABLE
from engine_adapter.http.openai_answer import OpenAIAnswer, pass_marked
from engine_adapter.types import TokenIds

_DETAILS = "cached_tokens_details"
# The mark of an event that is read.
_USAGE_OR_EXTENSION = re.compile(rb'"(?:usage|sglext)"\s*:\s*\{')
# The answer is complete.
_FINISHED = b'"finish_reason":"'
# In `meta_info`. Text cannot contain it: quotes in JSON strings have a backslash.
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d+)\b(?=\s*[,}])')
_LONGEST_MARK = 64
_NULL, _NO_CHOICES = msgspec.Raw(b"null"), msgspec.Raw(b"[]")
_Fields = dict[str, msgspec.Raw]
_decode_fields = msgspec.json.Decoder(_Fields).decode


class _Tiers(msgspec.Struct):
    """Cached tokens by tier."""

    device: int = 0
    host: int = 0
    storage: int | None = None


class DetailsAnswer(OpenAIAnswer):
    """`AnswerReader` for a request with `cached_tokens_details`."""

    def __init__(self, *, streams: bool, hides_details: bool) -> None:
        """`hides_details`: the client did not ask for them."""
        super().__init__(streams=streams, hides_usage=False, reads_tokens=False, hides_tokens=False)
        self._hides_details = hides_details
        self._finished = False

    def feed(self, chunk: bytes) -> bytes:
        """See `AnswerReader.feed`."""
        return super().feed(chunk) if self._streams else self._pass_object(chunk)

    def cached_tokens(self) -> int | None:
        """See `AnswerReader.cached_tokens`. None if the answer broke off."""
        return self._cached or 0 if self._finished else None

    def _pass_events(self, events: bytes) -> bytes:
        self._finished |= _FINISHED in events
        return pass_marked(events, _USAGE_OR_EXTENSION, self._pass_object)

    def _pass_object(self, content: bytes) -> bytes:
        """The client's version of an answer or a stream event."""
        start, end = content.find(b"{"), content.rfind(b"}") + 1
        try:
            fields = _decode_fields(content[start:end])
            is_last = not self._streams or fields.get("choices") == _NO_CHOICES
            changed = self._read_details(fields)
            if is_last and fields.get("usage", _NULL) != _NULL:
                changed |= self._fill_usage(fields)
            elif self._streams and is_last and changed and "sglext" not in fields:
                return b""  # the chunk held nothing but the details
        except UNREADABLE:
            return content
        return content[:start] + msgspec.json.encode(fields) + content[end:] if changed else content

    def _read_details(self, fields: _Fields) -> bool:
        """Reads the details; True if they were removed."""
        extension = _decode_fields(fields["sglext"]) if fields.get("sglext", _NULL) != _NULL else {}
        if _DETAILS not in extension:
            return False
        tiers = msgspec.json.decode(extension.pop(_DETAILS), type=_Tiers)
        self._cached = tiers.device + tiers.host + (tiers.storage or 0)
        if not self._hides_details:
            return False
        if extension:
            fields["sglext"] = msgspec.Raw(msgspec.json.encode(extension))
        else:
            del fields["sglext"]
        return True

    def _fill_usage(self, fields: _Fields) -> bool:
        """Adds the cached tokens to a usage without them; True if it did."""
        self._finished = True
        usage = _decode_fields(fields["usage"])
        details = usage.get("prompt_tokens_details", _NULL)
        known = _decode_fields(details) if details != _NULL else {}
        if known.get("cached_tokens", _NULL) != _NULL:
            return False
        known["cached_tokens"] = msgspec.Raw(b"%d" % (self._cached or 0))
        usage["prompt_tokens_details"] = msgspec.Raw(msgspec.json.encode(known))
        fields["usage"] = msgspec.Raw(msgspec.json.encode(usage))
        return True


class GenerateAnswer:
    """`AnswerReader` of `/generate`: every answer and event tells the cached tokens. Changes nothing."""

    assembles = False

    def __init__(self) -> None:
        self._cached: int | None = None
        self._held = b""  # may end inside what is searched for

    def feed(self, chunk: bytes) -> bytes:
        """See `AnswerReader.feed`."""
        if self._cached is None:
            searched = self._held + chunk
            found = _CACHED.search(searched)
            self._cached = int(found[1]) if found is not None else None
            self._held = searched[-_LONGEST_MARK:]
        return chunk

    def finish(self) -> bytes:
        """See `AnswerReader.finish`."""
        return b""

    def cached_tokens(self) -> int | None:
        """See `AnswerReader.cached_tokens`. Of several prompts, those of the first."""
        return self._cached

    def prompt_tokens(self) -> TokenIds[int] | None:
        """See `AnswerReader.prompt_tokens`."""
        return None
