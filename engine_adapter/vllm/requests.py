"""Changes to a client's request: token ids for text, and questions whose answers the client does not see."""

from __future__ import annotations

from engine_adapter.body import JsonBody
from engine_adapter.hold import Hold
from engine_adapter.http.openai_answer import hold_openai
from engine_adapter.types import KvTarget
from engine_adapter.vllm.prompts import RENDERED_ROUTES

_COMPLETIONS = "/v1/completions"
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
# vLLM's own tokens are compared with ours for the first prompts of a connection, then for one in a hundred.
_FIRST, _EVERY = 16, 100


class RequestShaper:
    """Shapes the requests of one connection. `asks_usage`: ask streams for their reused tokens."""

    def __init__(self, *, asks_usage: bool) -> None:
        self._asks_usage = asks_usage
        self._seen = 0

    def hold(self, path: str, body: JsonBody, prompt: KvTarget | None, *, tell_reuse: bool) -> Hold:
        """The hold of a request; `tell_reuse`: ask the engine to report reused blocks."""
        if path not in RENDERED_ROUTES:
            return Hold(body)
        changes: dict[str, object] = {}
        if tell_reuse:
            changes |= _with_reuse_told(body)
        ask_tokens = prompt is not None and self._is_sampled()
        if prompt is not None and not ask_tokens:
            changes |= _ids_for_text(path, body, prompt)
        hold = hold_openai(path, body, changes=changes, ask_usage=self._asks_usage, ask_tokens=ask_tokens)
        if _computes_all(path, body):
            hold.cached_tokens = 0
        if body.hint("n") not in (None, 1) and body.get("stream") is not True:
            hold.firm = False  # what vLLM reports is the reuse of the choice that ended last
        return hold

    def _is_sampled(self) -> bool:
        self._seen += 1
        return self._seen <= _FIRST or self._seen % _EVERY == 0


def _ids_for_text(path: str, body: JsonBody, prompt: KvTarget) -> dict[str, object]:
    """The prompt as token ids, so that the engine need not tokenise it again."""
    fits = path == _COMPLETIONS and prompt.exact and prompt.token_ids and prompt.extra_ids is None
    if not fits or any(name in body for name in _TEXT_STAYS) or not isinstance(body.get("prompt"), str):
        return {}
    return {"prompt": prompt.token_ids.tolist() if prompt.token_ids is not None else None}


def _with_reuse_told(body: JsonBody) -> dict[str, object]:
    given = body.get("vllm_xargs")
    if given is not None and not isinstance(given, dict):
        return {}  # the engine refuses it
    return {"vllm_xargs": {"kv_cache_report_mode": "full", **(given or {})}}


def _computes_all(path: str, body: JsonBody) -> bool:
    """Whether vLLM computes the whole prompt, whatever it holds: prompt logprobs need that."""
    if body.get("prompt_logprobs") is not None:
        return True
    return path == _COMPLETIONS and bool(body.get("echo")) and body.get("logprobs") is not None
