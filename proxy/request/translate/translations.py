"""The routes that can be served as chats."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from proxy.request.translate.messages_api import MessageTranslation
from proxy.request.translate.responses_api import INPUT_TOKENS_PATH, RESPONSES_PATH, ResponseTranslation
from proxy.request.translate.responses_store import ResponseStore
from proxy.request.translate.translation import Translate


def translations(responses: ResponseStore) -> Mapping[str, Translate]:
    """Route → what translates a body that was sent there. `responses` keeps those that clients want kept."""
    return {
        "/v1/messages": lambda body, _tenant: MessageTranslation(body),
        "/v1/messages/count_tokens": lambda body, _tenant: MessageTranslation(body, counts=True),
        RESPONSES_PATH: partial(ResponseTranslation, store=responses),
        INPUT_TOKENS_PATH: partial(ResponseTranslation, store=responses, counts=True),
    }
