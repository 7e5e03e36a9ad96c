"""Requests of other APIs, served as chats, for engines that lack a route or would run it unpinned.

translation.py        one translated request, and the stage that its answer passes
wording.py            how each API words an error; errors about the chat, in the client's words
fates.py              what becomes of each tool, block, item, field and stop reason
messages.py           Anthropic's Messages API
responses.py          OpenAI's Responses API: its requests and answers
responses_items.py    their items
responses_store.py    what is kept of them

`EngineInfo.served_as_chats` names the routes that an engine wants translated. `Preparation.prepare`
translates, so that all later steps, and dry runs, see a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from proxy.request.translate.messages import MessageTranslation
from proxy.request.translate.responses import (
    INPUT_TOKENS_PATH,
    RESPONSES_PATH,
    ResponseTranslation,
    may_name_more,
)
from proxy.request.translate.responses_store import ResponseStore
from proxy.request.translate.translation import CHAT_PATH, Predicted, Translate, Translation


def translations(responses: ResponseStore) -> Mapping[str, Translate]:
    """Route → what translates a body that was sent there. `responses` keeps those that clients want kept."""
    return {
        "/v1/messages": lambda body, _tenant: MessageTranslation(body),
        "/v1/messages/count_tokens": lambda body, _tenant: MessageTranslation(body, counts=True),
        RESPONSES_PATH: partial(ResponseTranslation, store=responses),
        INPUT_TOKENS_PATH: partial(ResponseTranslation, store=responses, counts=True),
    }
