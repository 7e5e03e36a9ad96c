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
    """`old` becomes `new` in `file`; `about`: what it breaks."""

    about: str
    file: str
    old: str
    new: str


# ruff: noqa: E501 - a mutation a line
# fmt: off
MUTATIONS = (
    Mutation("wire: an answer's header goes on to the client", "proxy/headers.py", '    "set-cookie",\n', ""),
    Mutation("wire: a client's header goes on to the engine", "engine_adapter/http/prepare.py", '        "te",\n', ""),
    Mutation("wire: the word before a body", "proxy/http/exchange.py", "HTTP/1.1 100 Continue", "HTTP/1.1 100 Go on"),
    Mutation("gate: one request more at a time", "proxy/core/quotas.py",
             "+ elsewhere < self._concurrent", "+ elsewhere <= self._concurrent"),
    Mutation("gate: the time until a retry", "proxy/core/quotas.py",
             "(amount - self._left) * MINUTE_S", "(amount - self._left) * 2 * MINUTE_S"),
    Mutation("errors: a status", "engine_adapter/codes.py", '"invalid_api_key", 401,', '"invalid_api_key", 403,'),
    Mutation("errors: the sentence when all engines failed", "proxy/request/engine_errors.py",
             "failed this request; the last said", "failed this request. The last said"),
    Mutation("retries: 429 is the client's", "proxy/request/engine_errors.py", "{429, *range(500, 600)}", "{*range(500, 600)}"),
    Mutation("retries: a refused key is not tried elsewhere", "engine_adapter/causes.py",
             'Blame.IF_ANSWERED, "elsewhere")', "Blame.IF_ANSWERED)"),
    Mutation("placement: ties go to the fullest cache", "proxy/core/placement/scores.py",
             "-(candidate.free_blocks or 0)", "(candidate.free_blocks or 0)"),
    Mutation("index: a prompt's last token is reused", "proxy/core/index/blocks.py",
             "max(self.n_tokens - 1, 0) //", "max(self.n_tokens, 0) //"),
    Mutation("tokenising: chats begin with one more token", "engine_adapter/prompt/chat.py",
             "self.encode_all([text], add_special_tokens=False", "self.encode_all([text], add_special_tokens=True"),
    Mutation("translation: why a message stopped", "proxy/request/translate/messages_answer.py",
             '"length": "max_tokens"', '"length": "end_turn"'),
    Mutation("translation: why a response stopped", "proxy/request/translate/responses_api.py",
             '"length": "max_output_tokens"', '"length": "max_tokens"'),
    Mutation("streams: token ids that nobody asked for", "engine_adapter/http/openai_answer.py",
             "dict.fromkeys(fields.keys() & names, NULL)", "{}"),
    Mutation("migration: a second role", "proxy/request/migration.py", "names_role = self._has_role and", "names_role = False and"),
    Mutation("salts: tenants share one", "proxy/request/tenants.py", 'f"kvpin-{self._digest(tenant)}"', 'f"kvpin-{self._digest(\'\')}"'),
    Mutation("usage: tokens of answers", "proxy/observe/metrics.py", "used.output_tokens += record.output_tokens or 0", "pass"),
    Mutation("metrics: a bucket", "proxy/observe/metrics.py", "7.5, 10, 20, 40, 80)", "7.5, 10, 20, 40)"),
    Mutation("admin: days of use", "proxy/core/tenant_use.py", "if day > first]", "if day > first + days]"),
    Mutation("log: what an engine did", "proxy/steps/request.py", '"the engine refused a request"', '"the engine refused it"'),
    Mutation("normalise: tools stay as they are", "proxy/core/normalise.py",
             '_SCHEMAS = ("parameters", "input_schema")', '_SCHEMAS = ("input_schema",)'),
    Mutation("sessions: a header", "proxy/headers.py", '    "x-session-id",\n', ""),
)
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
