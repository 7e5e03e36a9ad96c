"""Requests of other APIs, served as chats, for engines that lack a route or would run it unpinned.

translation.py        one translated request, and its client
wording.py            errors about the chat, in the client's words
translations.py       the routes that can be translated
fates.py              what becomes of each tool, block, item and field
chats.py              the answers of chats as engines send them
messages_api.py       Anthropic's Messages API
messages_request.py   its requests
messages_answer.py    its answers
responses_api.py      OpenAI's Responses API
responses_request.py  its requests
responses_items.py    their items
responses_answer.py   its answers
responses_store.py    what is kept of them

`EngineInfo.served_as_chats` names the routes that an engine wants translated. `Flow.prepare` translates, so
that all later steps, and dry runs, see a chat.
"""

from __future__ import annotations

from proxy.request.translate.responses_api import RESPONSES_PATH
from proxy.request.translate.responses_request import may_name_more
from proxy.request.translate.responses_store import ResponseStore
from proxy.request.translate.translation import (
    CHAT_PATH,
    Predicted,
    Translate,
    Translated,
    Translation,
)
from proxy.request.translate.translations import translations
