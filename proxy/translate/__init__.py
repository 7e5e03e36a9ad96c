"""Requests of other APIs, served as chats, for engines that lack a route or would run it unpinned.

translation.py  one translated request: the chat, and its answer in the words of the API that was asked
translated.py   the client of such a request: gets the engine's answer to the chat, sends the translated one
chats.py        the answers of chats as engines send them, and their token counts
sse.py          the events of a stream, from its chunks
registry.py     the routes that can be translated
messages.py     Anthropic's Messages API: its requests (messages_request.py) and answers (messages_answer.py)
responses.py    OpenAI's Responses API: requests (responses_request.py, responses_items.py), answers
                (responses_answer.py), and what is kept of them (responses_store.py)

response_homes.py   which engine made a response, where engines serve that API themselves

`EngineInfo.served_as_chats` names the routes that an engine wants translated. `Flow.prepare` translates, so
that all later steps, and dry runs, see a chat.
"""

from __future__ import annotations

from proxy.translate.registry import translations
from proxy.translate.response_homes import (
    CONTINUING,
    ResponseHome,
    ResponseHomes,
    ResponseNoter,
    response_named,
)
from proxy.translate.responses import RESPONSES_PATH
from proxy.translate.responses_request import may_name_more
from proxy.translate.responses_store import ResponseStore
from proxy.translate.translated import Translated
from proxy.translate.translation import CHAT_PATH, Predicted, Translate, Translation

__all__ = [
    "CHAT_PATH",
    "CONTINUING",
    "RESPONSES_PATH",
    "Predicted",
    "ResponseHome",
    "ResponseHomes",
    "ResponseNoter",
    "ResponseStore",
    "Translate",
    "Translated",
    "Translation",
    "may_name_more",
    "response_named",
    "translations",
]
