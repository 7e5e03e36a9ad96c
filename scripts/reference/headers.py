"""The page of all headers. Meanings are in Markdown; links are relative to docs/."""

from __future__ import annotations

from typing import NamedTuple

from engine_adapter import PRIVATE_HEADERS
from engine_adapter.http.prepare import ENDS_HERE
from proxy.headers import (
    ANTHROPICS_ID_HEADER,
    CACHED_HEADER,
    CHANGED_HEADER,
    COMPARISON_HEADER,
    DEADLINE_HEADERS,
    DROPPED_HEADERS,
    ENGINE_HEADER,
    FIRM_HEADER,
    FORWARDED_HEADERS,
    FORWARDED_PREFIX,
    KEY_HEADERS,
    LIMIT_PREFIX,
    NORMALISED_HEADER,
    NOTE_HEADER,
    OWN_PREFIX,
    POLICY_HEADER,
    PREDICTED_HEADER,
    PRIORITY_HEADER,
    REQUEST_ID_HEADER,
    RETENTION_HEADER,
    RETRY_AFTER_HEADER,
    RETRY_HEADERS,
    SESSION_HEADERS,
    SHOULD_RETRY_HEADER,
)
from scripts.reference.markdown import codes, page, table


class OfRequest(NamedTuple):
    """Headers of a request, best first."""

    names: tuple[str, ...]
    meaning: str


class OfAnswer(NamedTuple):
    """Headers of an answer, on which answers they are, and an example of a value."""

    names: tuple[str, ...]
    on: str
    meaning: str
    example: str


REQUEST_HEADERS = (
    OfRequest(
        KEY_HEADERS,
        "the client's key, and cookies. Where kvpin has keys, they end here; else the key is the engine's",
    ),
    OfRequest(
        (REQUEST_ID_HEADER,), "the client's name for the request, up to 128 printable ASCII characters"
    ),
    OfRequest(
        SESSION_HEADERS,
        "the conversation: ties go to the engine that had it last. The fields `session_id` and "
        "`prompt_cache_key` of the body say the same",
    ),
    OfRequest(
        (PRIORITY_HEADER,),
        "-8 to 8; the lowest goes first among the [waiting](operations.md#overload) requests of a tenant",
    ),
    OfRequest(
        (COMPARISON_HEADER,),
        "the id of an earlier answer, or its `x-request-id`: say [why no more of the prompt was "
        "reused](misses.md#in-answers), "
        "compared with that one",
    ),
    OfRequest(DEADLINE_HEADERS, "seconds that the client waits"),
    OfRequest(("content-type",), "on routes of files: a form, or a file"),
    OfRequest(("content-length", "expect"), "the length of the body, and whether to ask for it"),
    OfRequest(
        ("content-encoding",),
        "`gzip`, `deflate` or `zstd`: kvpin unpacks a JSON body, and the engine gets it plain; any other is "
        "refused",
    ),
    OfRequest(
        ("origin", "access-control-request-method", "access-control-request-headers"),
        "the [web page](api.md#web-pages) that asks",
    ),
    OfRequest(
        ("sec-websocket-protocol",),
        "on [WebSockets](api.md#websockets): the client's key, as `openai-insecure-api-key.KEY`",
    ),
    OfRequest(
        (*FORWARDED_HEADERS, f"{FORWARDED_PREFIX}*"),
        "the request came through a proxy; [without an admin key](keys.md#without-an-admin-key), the "
        "admin API refuses it",
    ),
)
ANSWER_HEADERS = (
    OfAnswer(
        (REQUEST_ID_HEADER,),
        "answers under `/v1`, but not lists of models",
        "the client's own, or one of kvpin's; finds the request in logs and `kvpin requests`",
        "req-5bf1…",
    ),
    OfAnswer((ANTHROPICS_ID_HEADER,), "answers under `/v1/messages`", "the same", "req-5bf1…"),
    OfAnswer((ENGINE_HEADER,), "answers of engines", "the engine that answered", "vllm-0"),
    OfAnswer(
        (PREDICTED_HEADER,),
        "answers of engines",
        "prompt tokens that kvpin predicted to come from cache",
        "2416",
    ),
    OfAnswer(
        (FIRM_HEADER,),
        "answers of engines, where that prediction is not firm",
        "`not-firm`: the engine may reuse another number of tokens, and the audit does not count the "
        "prediction. It rests on what requests in flight have yet to store or may evict; or it goes on from "
        "an answer in a slot of a llama-server, whose tokens kvpin knows only once it has saved the slot; or "
        "the engine holds KV that it tells nobody of, as a llama-server with its own prompt cache",
        "not-firm",
    ),
    OfAnswer(
        (CACHED_HEADER,),
        "answers whose engine reports it before the first byte: all that are no streams, and streams of an "
        "embedded engine",
        "prompt tokens that came from cache",
        "2416",
    ),
    OfAnswer(
        (NOTE_HEADER,),
        "answers served in an unusual way",
        "one sentence, e.g. that it may use KV that was moved; also in `kvpin requests --json`",
        "not exact: …",
    ),
    OfAnswer(
        (RETENTION_HEADER,),
        "answers to requests that ask to [keep their KV](retention.md#what-clients-ask-for)",
        "seconds for which the engine keeps it; 0: it takes no such wish, or kvpin does not know the prompt",
        "1800",
    ),
    OfAnswer(
        (NORMALISED_HEADER,),
        "answers to requests whose prompt kvpin changed",
        "the [rules](normalise.md) that changed it",
        "date_to_day,tools_sorted",
    ),
    OfAnswer(
        (CHANGED_HEADER,),
        "answers to requests in which kvpin changed something else",
        "`half_characters`: half of an emoji became U+FFFD; and what a [translation](reference/fates.md) "
        "left out or turned into text, 16 names at most",
        "half_characters,tool:web_search",
    ),
    OfAnswer(
        (POLICY_HEADER,),
        "answers of engines",
        "a browser that shows the answer as a page runs [none of its scripts](threat-model.md#boundaries)",
        "sandbox",
    ),
    OfAnswer((RETRY_AFTER_HEADER,), "429, 503", "seconds", "1"),
    OfAnswer(
        (SHOULD_RETRY_HEADER,),
        "failures",
        "`false`: kvpin tried several engines and all failed; otherwise the engine's own",
        "false",
    ),
    OfAnswer(
        (f"{LIMIT_PREFIX}*",),
        "answers to a tenant with [limits](keys.md#limits-of-a-tenant)",
        "the limits for a minute, what is left of them, and the time until all of it is there again: "
        "`limit-requests`, `remaining-requests`, `reset-requests`, and the same of `tokens`",
        "599",
    ),
    OfAnswer((*RETRY_HEADERS, f"{LIMIT_PREFIX}*"), "errors of engines", "the engine's own", "20"),
    OfAnswer(("www-authenticate",), "401", "the kind of key", "Bearer"),
    OfAnswer(("allow",), "405, and answers to OPTIONS", "the methods of the route", "GET, HEAD, OPTIONS"),
    OfAnswer(
        ("access-control-*", "vary"),
        "with `cors_origins`, all answers under `/v1`",
        "what a [web page](api.md#web-pages) may read",
        "*",
    ),
)


def headers_page() -> str:
    """Every header that kvpin reads, sets or drops."""
    return page(
        """
        # Headers

        `scripts/docs` writes this page from `scripts/reference/headers.py`.

        ## Of answers
        """,
        table(
            ("header", "on", "meaning", "example"),
            ((codes(each.names), each.on, each.meaning, f"`{each.example}`") for each in ANSWER_HEADERS),
        ),
        f"""
        All other headers of an engine's answer are passed on, except {codes(sorted(DROPPED_HEADERS))}
        and `{OWN_PREFIX}*`. Of an engine's error only those of the table are.

        ## Of requests

        kvpin reads these and passes them on, except where the table says otherwise.
        """,
        table(("header", "meaning"), ((codes(each.names), each.meaning) for each in REQUEST_HEADERS)),
        f"""
        These are never passed on: `{OWN_PREFIX}*`, {codes(sorted(ENDS_HERE))}.
        With several tenants, neither are
        {codes(sorted(name.decode() for name in PRIVATE_HEADERS))}.
        """,
    )
