"""Answers of a llama-server and leases of requests, made by hand."""

from __future__ import annotations

from array import array

import msgspec

from engine_adapter.llama_server.scheduler import SlotLease, SlotRequest

DONE = b"data: [DONE]\n\n"


def event(**fields):
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def part(finish_reason=None, **fields):
    return event(id="x", choices=[{"index": 0, "finish_reason": finish_reason, **fields}])


def delta(**fields):
    return part(delta=fields)


def native_stream(*tokens, **end):
    """A stream of the server's own completions: (token, how many are predicted by then) each."""
    events = [
        event(content="x", tokens=[token], stop=False, tokens_predicted=predicted)
        for token, predicted in tokens
    ]
    return b"".join([*events, event(tokens=[], **end)])


def lease_of(tokens=(), salt=None, answer=None):
    """The lease of a request whose slot was empty."""
    return SlotLease(
        slot=0,
        ask=SlotRequest(array("i", tokens), salt),
        cached_tokens=0,
        firm=True,
        may_reuse=True,
        restored=False,
        before=array("i"),
        length_before=0,
        started=0.0,
        answer=answer,
    )
