"""Reads cached tokens from SGLang's answers: from `meta_info` of `/generate`, and from the `sglext` field of
the OpenAI routes, for servers whose usage does not report them.

SGLang sends `sglext` on request, and only if the prompt reused something. In a stream it is a chunk of its
own before the usage. If the client did not ask for it, it is removed. Its count is copied into the usage.
"""

from __future__ import annotations

import re

import msgspec
from typing_extensions import override

from engine_adapter.body import RawFields, decode_object
from engine_adapter.hold import AnswerReader
from engine_adapter.http.answer_fields import NULL
from engine_adapter.http.openai_answer import USAGE, OpenAIAnswer, pass_marked

_DETAILS = "cached_tokens_details"
# Stands beside the details where there are several choices, empty if the client did not ask for it.
_SPECULATION, _NOTHING = "spec_tokens_details", msgspec.Raw(b"[]")
_USAGE_OR_EXTENSION = {**USAGE, b'"sglext"': re.compile(rb'"sglext"\s*:\s*\{')}
# The answer is complete.
_FINISHED = b'"finish_reason":"'
# In `meta_info`. Text cannot contain it: quotes in JSON strings have a backslash.
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d+)\b(?=\s*[,}])')
_LONGEST_MARK = 64
_NO_CHOICES = msgspec.Raw(b"[]")


class _Tiers(msgspec.Struct):
    """Cached tokens by tier."""

    device: int = 0
    host: int = 0
    storage: int | None = None


class DetailsAnswer(OpenAIAnswer):
    """Reads an answer to a request with `cached_tokens_details`."""

    def __init__(self, *, streams: bool, hides_details: bool) -> None:
        """`hides_details`: the client did not ask for them."""
        super().__init__(streams=streams)
        self.marks = (b'"usage"', b'"sglext"', _FINISHED)
        self._hides_details = hides_details
        self._finished = False

    @override
    def cached_tokens(self) -> int | None:
        # None if the answer broke off.
        return self._cached or 0 if self._finished else None

    @override
    def _pass_events(self, events: bytes) -> bytes:
        self._finished |= _FINISHED in events
        return pass_marked(events, _USAGE_OR_EXTENSION, self._pass)

    @override
    def _read(self, fields: RawFields) -> bool | None:
        is_last = not self._streams or fields.get("choices") == _NO_CHOICES
        changed = self._read_details(fields)
        if is_last and fields.get("usage", NULL) != NULL:
            return self._fill_usage(fields) or changed
        held_nothing_else = self._streams and is_last and changed and "sglext" not in fields
        return None if held_nothing_else else changed

    def _read_details(self, fields: RawFields) -> bool:
        """Reads the details; True if they were removed."""
        extension = decode_object(fields["sglext"]) if fields.get("sglext", NULL) != NULL else {}
        if _DETAILS not in extension:
            return False
        tiers = msgspec.json.decode(extension.pop(_DETAILS), type=_Tiers)
        self._cached = tiers.device + tiers.host + (tiers.storage or 0)
        if not self._hides_details:
            return False
        if extension.get(_SPECULATION) == _NOTHING:
            del extension[_SPECULATION]
        if extension:
            fields["sglext"] = msgspec.Raw(msgspec.json.encode(extension))
        else:
            del fields["sglext"]
        return True

    def _fill_usage(self, fields: RawFields) -> bool:
        """Adds the cached tokens to a usage without them; True if it did."""
        self._finished = True
        usage = decode_object(fields["usage"])
        details = usage.get("prompt_tokens_details", NULL)
        known = decode_object(details) if details != NULL else {}
        if known.get("cached_tokens", NULL) != NULL:
            return False
        known["cached_tokens"] = msgspec.Raw(b"%d" % (self._cached or 0))
        usage["prompt_tokens_details"] = msgspec.Raw(msgspec.json.encode(known))
        fields["usage"] = msgspec.Raw(msgspec.json.encode(usage))
        return True


class GenerateAnswer(AnswerReader):
    """Reads answers of `/generate`: every answer and event tells the cached tokens. Changes nothing."""

    takes_pieces = True

    def __init__(self) -> None:
        self._cached: int | None = None
        self._held = b""  # may end inside what is searched for

    @override
    def feed(self, chunk: bytes) -> bytes:
        if self._cached is None:
            searched = self._held + chunk
            found = _CACHED.search(searched)
            self._cached = int(found[1]) if found is not None else None
            self._held = searched[-_LONGEST_MARK:]
        return chunk

    @override
    def cached_tokens(self) -> int | None:
        # Of several prompts, those of the first.
        return self._cached
