"""A request body → the prompt exactly as the engine will see it.

render.py      which fields make the prompt, checked        tokenizer.py   here, or by asking the engine
extra_ids.py   extra ids of a prompt given as token ids     tables.py      registered p-tuning tables
media.py       images, audio and video                      exactness.py   are our ids the engine's?
builder.py     all of it: body → Prompt
"""

from proxy.prompt.builder import Exactness, Load, Prompt, PromptBuilder
from proxy.prompt.exactness import audit_tokens, verify_exactness
from proxy.prompt.media import MediaUuids
from proxy.prompt.tables import PromptTables

__all__ = [
    "Exactness",
    "Load",
    "MediaUuids",
    "Prompt",
    "PromptBuilder",
    "PromptTables",
    "audit_tokens",
    "verify_exactness",
]
