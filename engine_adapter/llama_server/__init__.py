"""llama-server: slots leased one operation at a time, saved, restored, and followed token by token.

adapter.py      all of it as an EngineAdapter          session.py        one server process and its scheduler
engine_info.py  what it is, for kvpin                  requests.py       a slot for each, or all
scheduler.py    leases slots                           turns.py          whose turn it is
own_tasks.py    work that no leaving client stops      plan.py           which slot, restore what? rates
slots.py        what each slot holds and runs          slot_io.py        the routes of slots
contents.py     moves KV between slots and files
verbs.py        flush, offload, restore, pin           routes.py         which routes it has
server_files.py lock and records beside saved files    mirror_events.py  what is held, as KV events
answer.py       which tokens an answer left            answer_reader.py  reads it on its way; assembles it
tokens.py       a request's token ids, by the server
saved.py        the registry of saved prefixes         saved_entry.py    one of them, and eviction order
saved_files.py  names, sidecars, checked moves         state_file.py     the format of a saved file
discovery.py    what a server is, by its own word      probe.py          what has to be tried out
checkpoints.py  how much of a slot is reused
command.py      how kvpin starts one                   options.py        settings of this kind
router.py       router mode: states of its models, and whose turn it is to be loaded
"""
