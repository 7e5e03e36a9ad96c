"""Requests of other APIs, served as chats, for engines that lack a route or would run it unpinned.

translation.py  one translated request: the chat, and its answer in the words of the API that was asked
translated.py   the client of such a request: gets the engine's answer to the chat, sends the translated one
sse.py          the events of a stream, from its chunks

`EngineInfo.served_as_chats` names the routes that an engine wants translated. `Flow.prepare` translates, so
that all later steps, and dry runs, see a chat.
"""

from __future__ import annotations

from proxy.translate.translated import Translated
from proxy.translate.translation import CHAT_PATH, TRANSLATIONS, Translation

__all__ = ["CHAT_PATH", "TRANSLATIONS", "Translated", "Translation"]
