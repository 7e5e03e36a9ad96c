"""Changes of kvpin's code that the comparison must find: one for each thing that a rebuilt kvpin may lose.

A change is a text that stands once in one file. If its file is gone, the text is looked for in all others.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("proxy", "engine_adapter")


@dataclass(frozen=True, slots=True)
class Mutation:
    """`old` becomes `new` in `file`; `about`: what it breaks. Cases whose name contains `case` must show it."""

    about: str
    case: str
    file: str
    old: str
    new: str


# ruff: noqa: E501 - a mutation a line
# fmt: off
MUTATIONS = tuple(Mutation(*row) for row in (
    ("wire: an answer's header goes on to the client", "headers for browsers", "proxy/headers.py", '    "set-cookie",\n', ""),
    ("wire: a client's header goes on to the engine", "headers that end here", "engine_adapter/http/prepare.py", '        "te",\n', ""),
    ("wire: the word before a body", "expect", "proxy/http/exchange.py", "HTTP/1.1 100 Continue", "HTTP/1.1 100 Go on"),
    ("gate: one request more at a time", "quota, two at once", "proxy/core/quotas.py", "+ elsewhere < self._concurrent", "+ elsewhere <= self._concurrent"),
    ("gate: the time until a retry", "quota", "proxy/core/quotas.py", "(amount - self._left) * MINUTE_S", "(amount - self._left) * 2 * MINUTE_S"),
    ("request: the range of priorities", "priority header odd", "proxy/request/gate.py", "int(given)) <= MAX_PRIORITY", "int(given)) <= 99"),
    ("errors: a status", "wrong key", "engine_adapter/causes.py", '"invalid_api_key", 401,', '"invalid_api_key", 403,'),
    ("errors: the sentence when all engines failed", "twice: broken JSON", "proxy/request/engine_errors.py", "failed this request; the last said", "failed this request. The last said"),
    ("retries: 429 is the client's", "engine: status 429", "proxy/request/engine_errors.py", "{429, *range(500, 600)}", "{*range(500, 600)}"),
    ("retries: a refused key is not tried elsewhere", "engine: status 401", "engine_adapter/causes.py", 'Blame.IF_ANSWERED, "elsewhere")', "Blame.IF_ANSWERED)"),
    ("placement: ties go to the fullest cache", "chat tiny", "proxy/core/placement/scores.py", "-(candidate.free_blocks or 0)", "(candidate.free_blocks or 0)"),
    ("placement: waiting work costs nothing", "at once", "proxy/core/placement/scores.py", "queue_s, decoding = load.queue_s,", "queue_s, decoding = 0.0,"),
    ("index: a prompt's last token is reused", "whole blocks", "proxy/core/index/blocks.py", "return max(n_tokens - 1, 0) // tokens_per_block", "return n_tokens // tokens_per_block"),
    ("prompt: each chat asks for an answer", "admin: stats", "engine_adapter/prompt/chat.py", "add_generation_prompt=add_generation_prompt,", "add_generation_prompt=True,"),
    ("vLLM: chats go without their tokens", "three at once", "engine_adapter/vllm/requests.py", 'return {"kv_transfer_params": {"prompt_token_ids": ids.tolist()}}', "return {}"),
    ("SGLang: a chat goes as text", "chat sg", "engine_adapter/sglang/requests.py", 'return {"input_ids": token_ids} if jinja and', "return {} if jinja and"),
    ("translation: why a message stopped", "route: messages", "proxy/request/translate/fates.py", '"length": Stop("max_tokens", ', '"length": Stop("end_turn", '),
    ("translation: why a response stopped", "responses as chats", "proxy/request/translate/fates.py", 'Stop("max_tokens", "max_output_tokens")', 'Stop("max_tokens", "max_tokens")'),
    ("streams: token ids that nobody asked for", "chat tiny: stream", "engine_adapter/http/openai_answer.py", "dict.fromkeys(fields.keys() & names, NULL)", "{}"),
    ("migration: a second role", "stream dies", "proxy/request/migration.py", "names_role = self._has_role and", "names_role = False and"),
    ("tenants: they share a salt", "key-two", "proxy/request/tenants.py", 'f"kvpin-{self._digest(tenant)}"', 'f"kvpin-{self._digest(\'\')}"'),
    ("keys: one that has expired is good", "old key", "proxy/request/tenants.py", "self.expires <= now", "self.expires <= 0"),
    ("usage: tokens of answers", "admin: usage", "proxy/observe/metrics.py", "used.output_tokens += record.answer_tokens", "pass"),
    ("metrics: a bucket", "admin: metrics", "proxy/observe/metrics.py", "7.5, 10, 20, 40, 80)", "7.5, 10, 20, 40)"),
    ("admin: days of use", "admin: usage", "proxy/core/quotas.py", "if day > first]", "if day > first + days]"),
    ("admin: an engine stays drained", "admin: drain", "proxy/control/reconciler.py", "elif engine.state is EngineState.DRAINING:", "elif engine.state is EngineState.REFUSED:"),
    ("log: what an engine did", "engine: status 500", "proxy/steps/request.py", '"the engine refused a request"', '"the engine refused it"'),
    ("normalise: tools stay as they are", "chat plain: tools", "proxy/core/normalise.py", '_SCHEMAS = ("parameters", "input_schema")', '_SCHEMAS = ("input_schema",)'),
    ("sessions: a header", "session header", "proxy/headers.py", '    "x-session-id",\n', ""),
))
# fmt: on


def mutated(checkout: Path, mutation: Mutation, place: Path) -> bool:
    """Copies a checkout's code to `place`, changed; False if the mutation's text is gone, or no longer alone."""
    for package in PACKAGES:
        shutil.copytree(checkout / package, place / package, ignore=shutil.ignore_patterns("__pycache__"))
    own = place / mutation.file
    files = [own] if own.is_file() and mutation.old in own.read_text() else sorted(place.rglob("*.py"))
    found = [file for file in files if mutation.old in file.read_text()]
    if len(found) != 1 or (text := found[0].read_text()).count(mutation.old) != 1:
        return False
    found[0].write_text(text.replace(mutation.old, mutation.new))
    return True
