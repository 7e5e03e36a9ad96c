"""Turns a request body into the prompt exactly as the engine will see it.

render.py             reads the fields that make the prompt
tokenizer.py          tokenises here, or asks an engine
registered_tables.py  registered p-tuning tables, their extra ids
known_chats.py        ids and blocks of earlier turns; chats with media up to the last of these, as an engine
                      rendered them
media.py              images, audio and video
exactness.py          compares our ids with the engine's
trust.py              who makes the ids of each form of prompt
builder.py            all of it: body → Prompt
"""

from proxy.prompt.builder import Load, Prompt, PromptBuilder
from proxy.prompt.exactness import audit_tokens, compare, lost_by, verify_exactness
from proxy.prompt.media import MediaUuids
from proxy.prompt.registered_tables import RegisteredTables
from proxy.prompt.trust import Audits, Exactness, FormTable, Trusted
