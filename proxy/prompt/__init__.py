"""Turns a request body into the prompt exactly as the engine will see it.

render.py      reads the fields that make the prompt         tokenizer.py   tokenises here, or asks an engine
extra_ids.py   extra ids of a prompt given as token ids      tables.py      registered p-tuning tables
media.py       images, audio and video                       exactness.py   compares our ids with the engine's
known_chats.py ids and blocks of earlier turns
builder.py     all of it: body → Prompt
"""

from proxy.prompt.builder import Exactness, Load, Prompt, PromptBuilder
from proxy.prompt.exactness import audit_tokens, verify_exactness
from proxy.prompt.media import MediaUuids
from proxy.prompt.tables import PromptTables
