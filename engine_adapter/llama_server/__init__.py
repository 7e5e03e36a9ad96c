"""llama-server: slots leased one operation at a time, saved, restored, and followed token by token.

adapter.py      all of it as an EngineAdapter          requests.py       a slot for each; answers
session.py      one server process and its scheduler; `write_back` of idle slots; what kvpin declares of it
scheduler.py    leases slots, and whose turn it is     plan.py           which slot, restore what? rates
slots.py        what each slot holds and runs
slot_io.py      the routes of slots; a request's token ids, by the server
contents.py     moves KV between slots and files
verbs.py        flush, offload, restore, pin
server_files.py lock and records beside saved files    mirror_events.py  what is held, as KV events
answer.py       what an answer says, and which tokens it left
saved.py        the registry of saved prefixes; work that no leaving client stops
saved_files.py  their format, sidecars, checked moves, and eviction order
discovery.py    what a server is, by its own word, and what has to be tried out
checkpoints.py  how much of a slot is reused
command.py      how kvpin starts one
options.py      settings of this kind, which routes it has
router.py       router mode: states of its models, and whose turn it is to be loaded
"""
