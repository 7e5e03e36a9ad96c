"""Which routes can be served as chats."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine_adapter import JsonBody
from proxy.translate.messages import CountTokens, Messages
from proxy.translate.translation import Translation

# Route → what translates a body that was sent there. Raises BadRequest for one that cannot be served.
TRANSLATIONS: Mapping[str, Callable[[JsonBody], Translation]] = {
    "/v1/messages": Messages,
    "/v1/messages/count_tokens": CountTokens,
}
