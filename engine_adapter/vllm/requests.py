"""Changes to a client's request: token ids for text, and questions whose answers the client does not see."""

from __future__ import annotations

from engine_adapter.body import JsonBody
from engine_adapter.hold import Hold
from engine_adapter.http.openai_answer import hold_openai
from engine_adapter.release import release_of
from engine_adapter.types import KvTarget
from engine_adapter.vllm.prompts import RENDERED_ROUTES

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# With these fields, vLLM does more with a text than tokenise it, or returns it.
_TEXT_STAYS = (
    "add_special_tokens",
    "echo",
    "prompt_embeds",
    "prompt_logprobs",
    "suffix",
    "truncate_prompt_tokens",
    "truncation_side",
)
# Likewise in chats; the first of these already carries ids, or names another server's KV.
_CHAT_STAYS = (
    "kv_transfer_params",
    "echo",
    "prompt_embeds",
    "prompt_logprobs",
    "return_prompt_text",
    "return_token_offsets",
    "truncate_prompt_tokens",
    "truncation_side",
    "use_beam_search",
)
# Chats' prompts may depend on the choice among tools, which `/tokenize` does not read: a server that has no
# `/render` did not prove their ids.
_ONLY_RENDERED = ("tools", "tool_choice")
_CHATS_TAKE_IDS_SINCE = (0, 27)


class RequestShaper:
    """Shapes the requests of one connection.

    Args:
        asks_usage: ask streams for their reused tokens.
        longest_chat: tokens of the longest chat that may go as token ids; 0 for none.
        renders: the server has `/render`.
    """

    def __init__(self, *, asks_usage: bool, longest_chat: int = 0, renders: bool = True) -> None:
        self._asks_usage = asks_usage
        self._longest_chat = longest_chat
        self._chat_stays = _CHAT_STAYS if renders else (*_CHAT_STAYS, *_ONLY_RENDERED)

    def hold(self, path: str, body: JsonBody, prompt: KvTarget | None, *, tell_reuse: bool) -> Hold:
        """The hold of a request; `tell_reuse`: ask the engine to report reused blocks."""
        if path not in RENDERED_ROUTES:
            return Hold(body)
        changes: dict[str, object] = {}
        if tell_reuse:
            changes |= _with_reuse_told(body)
        ask_tokens = prompt is not None and prompt.audit
        if prompt is not None and not ask_tokens:
            changes |= self._ids_for_text(path, body, prompt)
        hold = hold_openai(path, body, changes=changes, ask_usage=self._asks_usage, ask_tokens=ask_tokens)
        if computes_all(path, body):
            hold.cached_tokens = 0
        if body.hint("n") not in (None, 1) and body.get("stream") is not True:
            hold.firm = False  # what vLLM reports is the reuse of the choice that ended last
        return hold

    def _ids_for_text(self, path: str, body: JsonBody, prompt: KvTarget) -> dict[str, object]:
        """The prompt as token ids, so that the engine need not tokenise it again."""
        ids = prompt.token_ids
        if not ids or not prompt.exact or prompt.extra_ids is not None:
            return {}
        if path == _COMPLETIONS:
            is_text = isinstance(body.get("prompt"), str) and not any(name in body for name in _TEXT_STAYS)
            return {"prompt": ids.tolist()} if is_text else {}
        fits = path == _CHAT and len(ids) <= self._longest_chat
        if not fits or any(name in body for name in self._chat_stays):
            return {}
        return {"kv_transfer_params": {"prompt_token_ids": ids.tolist()}}


def longest_chat(version: str, max_model_len: int | None) -> int:
    """Tokens of the longest chat that a vLLM of this version takes as token ids (vLLM #48145); 0 for none.

    vLLM does not check their number: a chat that leaves no room for an answer goes as text, and is refused.
    """
    if max_model_len is None or release_of(version) < _CHATS_TAKE_IDS_SINCE:
        return 0
    return max_model_len - 1


def _with_reuse_told(body: JsonBody) -> dict[str, object]:
    given = body.get("vllm_xargs")
    if given is not None and not isinstance(given, dict):
        return {}  # the engine refuses it
    return {"vllm_xargs": {"kv_cache_report_mode": "full", **(given or {})}}


def computes_all(path: str, body: JsonBody) -> bool:
    """True if vLLM computes the whole prompt, whatever it holds: prompt logprobs need that."""
    if body.get("prompt_logprobs") is not None:
        return True
    return path == _COMPLETIONS and bool(body.get("echo")) and body.get("logprobs") is not None
